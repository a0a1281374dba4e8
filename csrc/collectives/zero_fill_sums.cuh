#pragma once

#include <algorithm>

#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/sent_rows.cuh"
#include "csrc/common/sm90/dependent_launch.cuh"

// Zero fill of a group reduce: a kernel on all SMs writes zeros to the input rows that no entry of `sends` has. It runs
// at the same time as the kernel that sums, which has only a few SMs and may write zeros to some of these rows as well.

namespace jaxmagi::collectives {

// About one CTA per SM: the kernel that sums starts when all of them run, and needs room on its SMs.
constexpr int kZeroCtas = 128;

__device__ inline void zero_row(const TransferParams& params, int64_t row, int widening) {
    for (int i = 0; i < params.num_arrays; ++i) {
        const ArrayParams& array = params.arrays[i];
        const int64_t bytes = int64_t{array.row_bytes} * widening;
        char* const to = array.to + row * bytes;
        for (int64_t at = threadIdx.x % kWarp * 16; at < bytes; at += kWarp * 16)
            *reinterpret_cast<uint4*>(to + at) = {};
    }
}

// Zeroes the rows without a send among kSentRows rows of transfer `index` of the batch, from row `begin` on.
__device__ inline void zero_block(const TransferParams& params, int64_t index, int64_t begin, int widening) {
    __shared__ bool is_sent[kSentRows];
    const int64_t end = min(begin + kSentRows, int64_t{params.input_rows});
    find_sent_rows(params.sends + index * params.entries, params.entries, begin, end, is_sent);
    for (int64_t row = begin + threadIdx.x / kWarp; row < end; row += kSentThreads / kWarp)
        if (not is_sent[row - begin])
            zero_row(params, index * params.input_stride + row, widening);
}

// `widening` is the size of a sum over the size of a number that travels.
__global__ void __launch_bounds__(kSentThreads)
    zero_empty_sums(const __grid_constant__ TransferParams params, int blocks_per_transfer, int widening) {
    sm90::launch_dependent_grids();
    for (int block = blockIdx.x; block < params.batch * blocks_per_transfer; block += gridDim.x)
        zero_block(params, block / blocks_per_transfer, int64_t{block % blocks_per_transfer} * kSentRows, widening);
}

inline cudaError_t launch_zero_empty_sums(const TransferParams& params, int widening, cudaStream_t stream) {
    const int blocks_per_transfer = (params.input_rows + kSentRows - 1) / kSentRows;
    const int ctas = std::min(params.batch * blocks_per_transfer, kZeroCtas);
    return launch(zero_empty_sums, ctas, kSentThreads, 0, stream, {}, params, blocks_per_transfer, widening);
}

}  // namespace jaxmagi::collectives
