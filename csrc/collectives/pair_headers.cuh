#pragma once

#include "csrc/collectives/checks.cuh"

// Headers of the parts of pair buffers: the sender writes the hash of its call and its number of rows, and the receiver
// compares them with its own. All functions are for all threads of a CTA.

namespace jaxmagi::collectives {

// Calls visit(header, peer, rows) on one thread for each remote peer, `rows` being those that `entries` have for it.
template <typename Entry, typename Visit>
__device__ __forceinline__ void for_remote_peers(const TransferParams& params, char* pair_buffer, const Entry* entries,
                                                 RowCounts& rows, Visit visit) {
    if (pair_buffer == nullptr)
        return;
    count_rows(params, entries, rows, [](const Entry*, int64_t) {});
    for (int peer = static_cast<int>(threadIdx.x); peer < params.size; peer += static_cast<int>(blockDim.x))
        if (not params.is_native(peer))
            visit(*reinterpret_cast<PairHeader*>(pair_buffer + peer * params.pair_bytes), peer, rows.of_peer[peer]);
}

// `entries` describe the rows that leave.
template <typename Entry>
__device__ inline void write_headers(const TransferParams& params, const Entry* entries, RowCounts& rows) {
    for_remote_peers(params, params.outgoing, entries, rows, [&](PairHeader& header, int, uint64_t num_rows) {
        header = {params.call_hash, num_rows};
    });
}

// `entries` describe the rows that should have arrived.
template <typename Entry>
__device__ inline void check_headers(const TransferParams& params, const Entry* entries, RowCounts& rows) {
    for_remote_peers(params, params.incoming, entries, rows, [&](PairHeader& header, int peer, uint64_t num_rows) {
        check_same_call(params, peer, header.call_hash);
        check_same_rows(peer, params.rank, header.rows, num_rows);
    });
}

}  // namespace jaxmagi::collectives
