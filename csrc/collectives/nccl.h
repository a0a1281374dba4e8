#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

// The NCCL operations of the collectives, on a communicator of XLA's. They go to the library that XLA has loaded, which
// alone understands this communicator: it is found among the loaded libraries, and neither linked nor opened a second
// time. Failures throw std::runtime_error.

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

// `to` is `size` times as large as `from`, which may be the rank's own part of `to`.
void all_gather(const void* from, void* to, size_t bytes_each, Communicator communicator, cudaStream_t stream);

// Sends and receives all messages as one NCCL group, in which they cannot wait for each other. Between two ranks, sends
// and receives match in the order of the lists.
void exchange(std::span<const Message> sends, std::span<const Message> receives, Communicator communicator,
              cudaStream_t stream);

}  // namespace jaxmagi::nccl
