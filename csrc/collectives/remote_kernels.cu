#include "csrc/collectives/remote_kernels.h"

#include <algorithm>

#include "csrc/collectives/checks.cuh"
#include "csrc/collectives/launch.cuh"

namespace jaxmagi::collectives {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kMaxCtas = 1024;

// Each warp makes one copy at a time.
__global__ void __launch_bounds__(kThreads) copy(const CopiedBytes* copies, int count) {
    const int lane = threadIdx.x % kWarp;
    for (int i = blockIdx.x * kWarps + threadIdx.x / kWarp; i < count; i += gridDim.x * kWarps) {
        const auto [from, to, bytes] = copies[i];
#pragma unroll 4
        for (int64_t at = lane * 16; at < bytes; at += kWarp * 16)
            *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
    }
}

__global__ void __launch_bounds__(kThreads)
    compare(const PairHeader* received, const PairHeader* expected, const PairText* texts, int count) {
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const PairHeader &theirs = received[i], &own = expected[i];
        const CallText text{"", texts[i].text};
        if (theirs.call == 0)  // calls count from 1: NCCL was aborted
            abort_kernel("jaxmagi: nothing has come from rank %d to rank %d (%s)\n", own.source, own.destination,
                         text.place);
        check_same_call(own.destination, own.source, own.call_hash ^ own.call, theirs.call_hash ^ theirs.call, text);
        check_same_rows(own.source, own.destination, theirs.rows, own.rows, text);
        if (not(theirs == own))
            abort_kernel("jaxmagi: the specs of ranks %d and %d have the rows between them in different ranges (%s)\n",
                         own.destination, own.source, text.place);
    }
}

}  // namespace

cudaError_t copy_bytes(const CopiedBytes* copies, int count, cudaStream_t stream) {
    return launch(copy, std::min((count + kWarps - 1) / kWarps, kMaxCtas), kThreads, 0, stream, {}, copies, count);
}

cudaError_t check_headers(const PairHeader* received, const PairHeader* expected, const PairText* texts, int count,
                          cudaStream_t stream) {
    return launch(compare, 1, kThreads, 0, stream, {}, received, expected, texts, count);
}

cudaError_t preload_remote_kernels() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, copy);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, compare) : error;
}

}  // namespace jaxmagi::collectives
