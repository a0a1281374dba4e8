#pragma once

#include <cstdio>

#include "csrc/collectives/transfer_params.h"

// Checks of the tables on the device: whether a rank's entries fit the call, and whether all ranks' tables and calls
// agree. A failed check ends the program, since the results of a transfer must then not be used.

namespace jaxmagi::collectives {

constexpr int kWarp = 32;

// Prints a message and traps. It is not inlined because printf takes registers.
template <typename... Args> [[noreturn]] __device__ __noinline__ void abort_kernel(const char* format, Args... args) {
    printf(format, args...);
    __trap();
    __builtin_unreachable();
}

// --- entries ---

__device__ inline void check_fits(const TransferParams& params, const Send& send) {
    const bool fits = send.peer >= 0 and send.peer < params.size and send.row >= 0 and send.slot >= 0 and
                      send.peer_row >= 0 and send.length <= params.input_rows - send.row and
                      send.length <= params.output_rows - send.peer_row and
                      send.length <= params.pair_rows - send.slot;
    if (not fits)
        abort_kernel("jaxmagi: rank %d has a spec with the entry (dst_rank %d, slot %d, row %d, length %d, dst_row "
                     "%d), which does not fit %d ranks, %d input rows, %d output rows and %d rows of a pair\n",
                     params.rank, send.peer, send.slot, send.row, send.length, send.peer_row, params.size,
                     params.input_rows, params.output_rows, params.pair_rows);
}

__device__ inline void check_fits(const TransferParams& params, const Receive& receive) {
    const bool fits = receive.peer >= 0 and receive.peer < params.size and receive.row >= 0 and receive.slot >= 0 and
                      receive.length <= params.output_rows - receive.row and
                      receive.length <= params.pair_rows - receive.slot;
    if (not fits)
        abort_kernel("jaxmagi: rank %d has a spec with the entry (src_rank %d, slot %d, row %d, length %d), which does "
                     "not fit %d ranks, %d output rows and %d rows of a pair\n",
                     params.rank, receive.peer, receive.slot, receive.row, receive.length, params.size,
                     params.output_rows, params.pair_rows);
}

// Checks entry `i` of a table [batch, entries]. Unused entries must be last, since searches end at the first of them.
template <typename Entry>
__device__ __forceinline__ void check_entry(const TransferParams& params, const Entry* entries, int64_t i) {
    const Entry entry = entries[i];
    const bool is_used = entry.length > 0;
    const bool follows_unused = is_used and i > 0 and entries[i - 1].length == 0 and i % params.entries != 0;
    if (entry.length < 0 or follows_unused)
        abort_kernel("jaxmagi: rank %d has a spec with an entry of length %d in place %d: those in use come first, "
                     "unused ones have length 0\n",
                     params.rank, entry.length, static_cast<int>(i % params.entries));
    if (is_used)
        check_fits(params, entry);
}

// --- agreement between ranks ---

// The call in messages: `name`, then `place`, a text in device memory.
struct CallText {
    const char *name, *place;
};

__device__ inline const char* name_before_place(Kind kind) {
    switch (kind) {
        case Kind::kCast: return "group_cast on ";
        case Kind::kReduce: return "group_reduce on ";
        case Kind::kMatmulReduceScatter: return "matmul_reduce_scatter on ";
        case Kind::kAllGatherMatmul: return "all_gather_matmul on ";
    }
    return "";
}

// Returns the text for a rank and its native peers, which share a host.
__device__ inline CallText native_text(const TransferParams& params) {
    return {name_before_place(params.kind), params.host_name == nullptr ? "one host" : params.host_name};
}

__device__ inline void check_same_call(int rank, int peer, uint64_t own_hash, uint64_t hash, CallText text) {
    if (hash != own_hash)
        abort_kernel("jaxmagi: ranks %d and %d make different calls of a group collective (%s%s)\n", rank, peer,
                     text.name, text.place);
}

__device__ inline void check_same_rows(int sender, int receiver, unsigned long long sent, unsigned long long received,
                                       CallText text) {
    if (sent != received)
        abort_kernel("jaxmagi: the spec of rank %d sends %llu rows to rank %d, whose spec expects %llu (%s%s)\n",
                     sender, sent, receiver, received, text.name, text.place);
}

struct RowCounts {
    unsigned long long at_slot[kMaxNativeRanks];
};

// Counts the rows that a table sends to each slot or receives from it, into shared memory, and calls visit(entries, i)
// for each entry. For all threads of a CTA.
template <typename Entry, typename Visit>
__device__ __forceinline__ void count_rows(const TransferParams& params, const Entry* entries, RowCounts& rows,
                                           Visit visit) {
    __syncthreads();  // no thread still reads the counts before
    for (unsigned slot = threadIdx.x; slot < kMaxNativeRanks; slot += blockDim.x)
        rows.at_slot[slot] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < int64_t{params.batch} * params.entries; i += blockDim.x) {
        visit(entries, i);
        if (const Entry entry = entries[i]; entry.length > 0)
            if (const int slot = params.slot_of(entry.peer); params.is_native(slot))
                atomicAdd(&rows.at_slot[slot], static_cast<unsigned long long>(entry.length));
    }
    __syncthreads();
}

}  // namespace jaxmagi::collectives
