#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

// The calls of NCCL that the collectives make, on a communicator that XLA owns. They go to the library that XLA loaded,
// since another copy would not understand that communicator: it is found among the loaded ones, never linked, never
// opened anew. Failures throw std::runtime_error.

namespace jaxmagi::nccl {

struct Comm;  // ncclComm
using Communicator = Comm*;

struct Message {
    void* data;
    size_t bytes;
    int peer;
};

int rank(Communicator communicator);
int size(Communicator communicator);

// `to` is `size` times as large as `from`, which may be the rank's own part of it.
void all_gather(const void* from, void* to, size_t bytes_each, Communicator communicator, cudaStream_t stream);

// All messages as one step, in which they cannot wait for each other. Between two ranks the sends of one meet the
// receives of the other in the order that both list them in.
void exchange(std::span<const Message> sends, std::span<const Message> receives, Communicator communicator,
              cudaStream_t stream);

}  // namespace jaxmagi::nccl
