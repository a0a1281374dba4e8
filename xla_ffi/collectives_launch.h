#pragma once

#include "xla_ffi/collectives_params.h"

namespace jaxmagi {

// Puts a transfer into its stream: kernels, messages by NCCL, and copies. Makes the program's stream wait for it,
// unless it is asynchronous. Returns the memory that it needs until it has ended.
std::vector<collectives::MemoryBlock> launch_transfer(Kind kind, const Buffers& buffers,
                                                      const TransferAttributes& attributes, collectives::Peers& peers,
                                                      cudaStream_t program, const DeviceMemory& memory);

}  // namespace jaxmagi
