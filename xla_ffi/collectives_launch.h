#pragma once

#include "xla_ffi/collectives_transfer.h"

// What is put into a stream for a call: kernels, exchanges by NCCL, and copies.

namespace jaxmagi {

struct Group {
    nccl::Communicator communicator;
    collectives::Peers* peers;
};

// `begun`, unless it is null, is recorded when the native kernel has its multiprocessors, or else just before NCCL's is
// next: that follows in the same stream, and so sooner than another stream hears of the event.
struct Launch {
    const collectives::Transfer& transfer;
    const Buffers& buffers;
    const Group& group;
    cudaStream_t stream;
    cudaEvent_t begun;

    bool is_native() const { return transfer.outgoing == nullptr; }
};

void launch_cast(const Launch& launch);
void launch_reduce(const Launch& launch);

}  // namespace jaxmagi
