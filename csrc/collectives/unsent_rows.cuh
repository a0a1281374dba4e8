#pragma once

#include "csrc/collectives/entries.cuh"
#include "csrc/collectives/rendezvous.cuh"

// Zeros to the output rows of a group cast that nobody sends: those between the entries of `receives`. These have to be
// sorted by row and disjoint, the unused ones last, or rows would be zeroed while peers store them. One warp of each
// CTA does it, beside the others. All functions are for a whole warp.

namespace jaxmagi::collectives {

// Output rows [begin, end) of one of the groups.
struct Rows {
    int begin, end;
};

constexpr int kStoresAtOnce = 8;  // a lone warp would wait for its own addition before each

// `turn`: which CTA begins. Short ranges take few of them.
__device__ inline void zero_rows(const Transfer& transfer, const Meeting& meeting, int group, Rows rows, int turn) {
    const int64_t cta = (blockIdx.x + turn) % gridDim.x;
    for (int i = 0; i < transfer.num_arrays; ++i) {
        const int64_t row_bytes = transfer.arrays[i].row_bytes;
        char* const first = reinterpret_cast<char*>(meeting.addresses[transfer.rank][i]) +
                            (int64_t{group} * transfer.output_rows + rows.begin) * row_bytes;
        const auto zero = [&](int64_t at) { *reinterpret_cast<uint4*>(first + at) = {}; };
        const int64_t bytes = (rows.end - rows.begin) * row_bytes, lane = threadIdx.x % kWarp;
        const int64_t step = int64_t{gridDim.x} * kWarp * 16;
        int64_t at = (cta * kWarp + lane) * 16;
        for (; at + (kStoresAtOnce - 1) * step < bytes; at += kStoresAtOnce * step)
#pragma unroll
            for (int i = 0; i < kStoresAtOnce; ++i)
                zero(at + i * step);
#pragma unroll 1  // the compiler would divide first, to unroll it
        for (; at < bytes; at += step)
            zero(at);
    }
}

// Those before each of the entries from the first one on, an entry for each lane. Entries that are not used, and one
// behind the last, count as such at the end of the rows. `done`: where the rows before them end; returns where theirs
// do.
__device__ inline int zero_before_entries(const Transfer& transfer, const Meeting& meeting, int group, int first,
                                          int done) {
    const int number = first + static_cast<int>(threadIdx.x % kWarp);
    Receive entry{.row = transfer.output_rows};
    if (number < transfer.entries)
        if (const Receive one = transfer.receives[int64_t{group} * transfer.entries + number]; one.length > 0) {
            check(transfer, one);
            entry = one;
        }
    const int end = entry.row + entry.length, before = __shfl_up_sync(~0u, end, 1);
    const Rows unsent{threadIdx.x % kWarp == 0 ? done : before, entry.row};
    if (unsent.end < unsent.begin)
        stop("jaxmagi: rank %d has a spec whose receives are not in order: rows from %d on come behind rows up to %d\n",
             transfer.rank, unsent.end, unsent.begin);
    for (unsigned lanes = __ballot_sync(~0u, unsent.begin < unsent.end); lanes; lanes &= lanes - 1) {
        const int lane = __ffs(lanes) - 1;
        zero_rows(transfer, meeting, group,
                  {__shfl_sync(~0u, unsent.begin, lane), __shfl_sync(~0u, unsent.end, lane)}, first + lane);
    }
    return __shfl_sync(~0u, end, kWarp - 1);
}

__device__ inline void zero_unsent_rows(const Transfer& transfer, const Meeting& meeting) {
    for (int group = 0; group < transfer.groups; ++group)
        for (int first = 0, done = 0; done < transfer.output_rows; first += kWarp)
            done = zero_before_entries(transfer, meeting, group, first, done);
}

}  // namespace jaxmagi::collectives
