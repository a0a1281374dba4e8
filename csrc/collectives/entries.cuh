#pragma once

#include "csrc/collectives/stop.cuh"
#include "csrc/collectives/transfer.h"

// Whether the entries of a rank's tables fit the call that they came with.

namespace jaxmagi::collectives {

__device__ inline void check(const Transfer& transfer, const Send& send) {
    const bool fits = send.peer >= 0 and send.peer < transfer.size and send.row >= 0 and send.slot >= 0 and
                      send.peer_row >= 0 and send.length <= transfer.input_rows - send.row and
                      send.length <= transfer.output_rows - send.peer_row and
                      send.length <= transfer.pair_rows - send.slot;
    if (not fits)
        stop("jaxmagi: rank %d has a spec with the entry (dst_rank %d, slot %d, row %d, length %d, dst_row %d), which "
             "does not fit %d ranks, %d input rows, %d output rows and %d rows of a pair\n",
             transfer.rank, send.peer, send.slot, send.row, send.length, send.peer_row, transfer.size,
             transfer.input_rows, transfer.output_rows, transfer.pair_rows);
}

__device__ inline void check(const Transfer& transfer, const Receive& receive) {
    const bool fits = receive.peer >= 0 and receive.peer < transfer.size and receive.row >= 0 and receive.slot >= 0 and
                      receive.length <= transfer.output_rows - receive.row and
                      receive.length <= transfer.pair_rows - receive.slot;
    if (not fits)
        stop("jaxmagi: rank %d has a spec with the entry (src_rank %d, slot %d, row %d, length %d), which does not "
             "fit %d ranks, %d output rows and %d rows of a pair\n",
             transfer.rank, receive.peer, receive.slot, receive.row, receive.length, transfer.size,
             transfer.output_rows, transfer.pair_rows);
}

// The i-th of all entries, used or not. Unused ones come last, since searches end with the first.
template <typename Entry>
__device__ __forceinline__ void check_entry(const Transfer& transfer, const Entry* entries, int64_t i) {
    const Entry entry = entries[i];
    const bool is_used = entry.length > 0;
    const bool is_behind_unused = is_used and i > 0 and entries[i - 1].length == 0 and i % transfer.entries != 0;
    if (entry.length < 0 or is_behind_unused)
        stop("jaxmagi: rank %d has a spec with an entry of length %d in place %d: those in use come first, unused "
             "ones have length 0\n",
             transfer.rank, entry.length, static_cast<int>(i % transfer.entries));
    if (is_used)
        check(transfer, entry);
}

}  // namespace jaxmagi::collectives
