#pragma once

#include "csrc/collectives/stop.cuh"
#include "csrc/collectives/transfer.h"

// How many rows a rank's tables have going to each peer, or coming from it: by that ranks find out that their specs do
// not belong together.

namespace jaxmagi::collectives {

constexpr int kWarp = 32, kMostSharedBytes = 227 * 1024;  // of a CTA

struct RowCounts {
    unsigned long long of_peer[kMaxRanks];
};

// By all threads of a CTA, in shared memory. Calls visit(ranges, i) for each, used or not.
template <typename Range, typename Visit>
__device__ __forceinline__ void count_rows(const Transfer& transfer, const Range* ranges, RowCounts& rows,
                                           Visit visit) {
    __syncthreads();  // nobody reads what was counted before
    for (unsigned peer = threadIdx.x; peer < kMaxRanks; peer += blockDim.x)
        rows.of_peer[peer] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < int64_t{transfer.groups} * transfer.entries; i += blockDim.x) {
        visit(ranges, i);
        if (const Range range = ranges[i]; range.length > 0 and static_cast<unsigned>(range.peer) < kMaxRanks)
            atomicAdd(&rows.of_peer[range.peer], static_cast<unsigned long long>(range.length));
    }
    __syncthreads();
}

template <typename Range>
__device__ inline void count_rows(const Transfer& transfer, const Range* ranges, RowCounts& rows) {
    count_rows(transfer, ranges, rows, [](const Range*, int64_t) {});
}

__device__ inline void check_same_call(const Transfer& transfer, int peer, uint64_t call) {
    if (call != transfer.call)
        stop("jaxmagi: ranks %d and %d make different calls of a group collective\n", transfer.rank, peer);
}

__device__ inline void check_same_rows(int sender, int receiver, unsigned long long sent, unsigned long long received) {
    if (sent != received)
        stop("jaxmagi: the spec of rank %d sends %llu rows to rank %d, whose spec expects %llu\n", sender, sent,
             receiver, received);
}

}  // namespace jaxmagi::collectives
