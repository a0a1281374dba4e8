#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/collectives/messages.h"

// The kernels around NCCL's: copies between arrays and staging memory, and the comparison of headers.

namespace jaxmagi::collectives {

// Bytes to be copied on the device, a multiple of 16.
struct CopiedBytes {
    const char* from;
    char* to;
    int64_t bytes;
};

// Copies are quick if each has a few KB, up to this much.
constexpr int64_t kMaxCopiedBytes = 32 << 10;

// Makes copies that are listed in device memory.
cudaError_t copy_bytes(const CopiedBytes* copies, int count, cudaStream_t stream);

// The call and its two ranks, for a message.
struct PairText {
    char text[192];
};

// Compares headers that have come from other ranks with those that this rank expects. A difference ends the program,
// with a message that has the pair's text. All are in device memory.
cudaError_t check_headers(const PairHeader* received, const PairHeader* expected, const PairText* texts, int count,
                          cudaStream_t stream);

// Loads the kernels, on each device before their first use.
cudaError_t preload_remote_kernels();

}  // namespace jaxmagi::collectives
