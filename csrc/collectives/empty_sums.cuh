#pragma once

#include <algorithm>

#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/row_counts.cuh"
#include "csrc/common/sm90/dependent_launch.cuh"

// Zeros to the sums of input rows that nobody has a part of: those that no entry of `sends` has. By all
// multiprocessors, as the kernel that adds up, which runs at the same time, has only a few. It may write zeros to such
// rows as well.

namespace jaxmagi::collectives {

// About one CTA for each multiprocessor: the kernel that adds up begins when all of them have, and needs room beside
// them.
constexpr int kZeroingCtas = 128, kZeroingThreads = 256, kZeroedRows = 64;

__device__ inline void zero_row(const Transfer& transfer, int64_t row, int widening) {
    for (int i = 0; i < transfer.num_arrays; ++i) {
        const Array& array = transfer.arrays[i];
        const int64_t bytes = int64_t{array.row_bytes} * widening;
        char* const to = array.to + row * bytes;
        for (int64_t at = threadIdx.x % kWarp * 16; at < bytes; at += kWarp * 16)
            *reinterpret_cast<uint4*>(to + at) = {};
    }
}

// Of kZeroedRows rows of a group, from row `begin` on, those that are empty.
__device__ inline void zero_block(const Transfer& transfer, int64_t group, int64_t begin, int widening) {
    __shared__ bool is_sent[kZeroedRows];
    const int64_t end = min(begin + kZeroedRows, int64_t{transfer.input_rows});
    __syncthreads();  // the block before is done
    for (unsigned i = threadIdx.x; i < kZeroedRows; i += kZeroingThreads)
        is_sent[i] = false;
    __syncthreads();
    for (int i = threadIdx.x; i < transfer.entries; i += kZeroingThreads) {
        const Send& send = transfer.sends[group * transfer.entries + i];
        const int64_t last = min(end, int64_t{send.row} + send.length);
        for (int64_t row = max(begin, int64_t{send.row}); row < last; ++row)
            is_sent[row - begin] = true;
    }
    __syncthreads();
    for (int64_t row = begin + threadIdx.x / kWarp; row < end; row += kZeroingThreads / kWarp)
        if (not is_sent[row - begin])
            zero_row(transfer, group * transfer.input_rows + row, widening);
}

// `widening`: bytes of sums for each byte that travels.
__global__ void __launch_bounds__(kZeroingThreads)
    zero_where_empty(const __grid_constant__ Transfer transfer, int blocks_of_group, int widening) {
    sm90::launch_dependent_grids();
    for (int block = blockIdx.x; block < transfer.groups * blocks_of_group; block += gridDim.x)
        zero_block(transfer, block / blocks_of_group, int64_t{block % blocks_of_group} * kZeroedRows, widening);
}

inline cudaError_t zero_empty_sums(const Transfer& transfer, int widening, cudaStream_t stream) {
    const int blocks_of_group = (transfer.input_rows + kZeroedRows - 1) / kZeroedRows;
    const int ctas = std::min(transfer.groups * blocks_of_group, kZeroingCtas);
    return launch(zero_where_empty, ctas, kZeroingThreads, 0, stream, {}, transfer, blocks_of_group, widening);
}

}  // namespace jaxmagi::collectives
