#pragma once

#include "xla_ffi/collectives_params.h"

namespace jaxmagi {

// Puts a transfer into its stream: kernels, exchanges of pair buffers by NCCL, and copies. Makes the program's stream
// wait for it, unless it is asynchronous.
void launch_transfer(Kind kind, const Buffers& buffers, const TransferAttributes& attributes,
                     collectives::Peers& peers, cudaStream_t program, xla::ffi::ScratchAllocator& allocator);

}  // namespace jaxmagi
