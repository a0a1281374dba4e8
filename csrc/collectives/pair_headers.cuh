#pragma once

#include "csrc/collectives/row_counts.cuh"

// The beginning of each part of a pair buffer: which call it belongs to, and how many rows it has. All functions are
// for all threads of a CTA.

namespace jaxmagi::collectives {

// Calls visit(peer) on some thread for each peer whose rows travel in pair buffers.
template <typename Visit> __device__ __forceinline__ void for_strangers(const Transfer& transfer, Visit visit) {
    for (int peer = static_cast<int>(threadIdx.x); peer < transfer.size; peer += static_cast<int>(blockDim.x))
        if (not transfer.is_native(peer))
            visit(peer);
}

// `ranges` are the rows that leave.
template <typename Range>
__device__ inline void write_headers(const Transfer& transfer, const Range* ranges, RowCounts& rows) {
    if (transfer.outgoing == nullptr)
        return;
    count_rows(transfer, ranges, rows);
    for_strangers(transfer, [&](int peer) {
        *reinterpret_cast<PairHeader*>(transfer.outgoing + peer * transfer.pair_bytes) = {transfer.call,
                                                                                        rows.of_peer[peer]};
    });
}

// `ranges` are the rows that should have come.
template <typename Range>
__device__ inline void check_headers(const Transfer& transfer, const Range* ranges, RowCounts& rows) {
    if (transfer.incoming == nullptr)
        return;
    count_rows(transfer, ranges, rows);
    for_strangers(transfer, [&](int peer) {
        const PairHeader header = *reinterpret_cast<const PairHeader*>(transfer.incoming + peer * transfer.pair_bytes);
        check_same_call(transfer, peer, header.call);
        check_same_rows(peer, transfer.rank, header.rows, rows.of_peer[peer]);
    });
}

}  // namespace jaxmagi::collectives
