#pragma once

#include "csrc/collectives/barrier.cuh"

// Zero fill of a group cast: writes zeros to the output rows from first_output_row on that nobody sends, which are
// those between the entries of `receives`. These entries must be sorted by row and disjoint, or rows would be zeroed
// while peers store them. One warp of each CTA does it while the others move rows. All functions are for a whole warp.

namespace jaxmagi::collectives {

constexpr int kStoresAtOnce = 8;  // unrolled, or a lone warp would wait for an addition of addresses before each store

// Zeroes output rows [begin, end) of transfer `index` of the batch. The CTAs share the work, rotated by `turn`, as
// short ranges need only few of them.
__device__ inline void zero_rows(const TransferParams& params, const CallState& call, int index, int begin, int end,
                                 int turn) {
    const int64_t cta = (blockIdx.x + turn) % gridDim.x;
    for (int i = 0; i < params.num_arrays; ++i) {
        const int64_t row_bytes = params.arrays[i].row_bytes;
        char* const first = reinterpret_cast<char*>(call.addresses[params.slot][i]) +
                            (int64_t{index} * params.output_rows + begin) * row_bytes;
        const auto zero = [&](int64_t at) { *reinterpret_cast<uint4*>(first + at) = {}; };
        const int64_t bytes = (end - begin) * row_bytes, lane = threadIdx.x % kWarp;
        const int64_t step = int64_t{gridDim.x} * kWarp * 16;
        int64_t at = (cta * kWarp + lane) * 16;
        for (; at + (kStoresAtOnce - 1) * step < bytes; at += kStoresAtOnce * step)
#pragma unroll
            for (int i = 0; i < kStoresAtOnce; ++i)
                zero(at + i * step);
#pragma unroll 1  // to unroll it, the compiler would divide first
        for (; at < bytes; at += step)
            zero(at);
    }
}

// Zeroes the rows before each of the next kWarp entries, one entry per lane. Unused entries and those after the last
// one count as entries at the end of the rows. `done` is the end of the entry before; returns the end of the last one.
__device__ inline int zero_before_entries(const TransferParams& params, const CallState& call, int index, int first,
                                          int done) {
    const int i = first + static_cast<int>(threadIdx.x % kWarp);
    Receive entry{.row = params.output_rows};
    if (i < params.entries)
        if (const Receive one = params.receives[int64_t{index} * params.entries + i]; one.length > 0) {
            check_fits(params, one);
            entry = one;
        }
    const int entry_end = entry.row + entry.length, end_before = __shfl_up_sync(~0u, entry_end, 1);
    const int begin = threadIdx.x % kWarp == 0 ? done : end_before, end = entry.row;
    if (end < begin)
        abort_kernel("jaxmagi: rank %d has a spec whose receives are not in order: rows from %d on come behind rows up "
                     "to %d\n",
                     params.rank, end, begin);
    for (unsigned lanes = __ballot_sync(~0u, begin < end); lanes; lanes &= lanes - 1) {
        const int lane = __ffs(lanes) - 1;
        zero_rows(params, call, index, __shfl_sync(~0u, begin, lane), __shfl_sync(~0u, end, lane), first + lane);
    }
    return __shfl_sync(~0u, entry_end, kWarp - 1);
}

__device__ inline void zero_unsent_rows(const TransferParams& params, const CallState& call) {
    for (int index = 0; index < params.batch; ++index)
        for (int first = 0, done = params.first_output_row; done < params.output_rows; first += kWarp)
            done = zero_before_entries(params, call, index, first, done);
}

}  // namespace jaxmagi::collectives
