#pragma once

#include <cstdint>

// The flags, addresses and counts that the ranks of a group store into each other's memory. All arrays are by the slots
// of ranks (peers.h). Each rank has one control block per group, zero before the first call. All ranks of a group make
// the same calls in the same order, so that each counts its calls for itself, on the device: the count is the epoch of
// a call.

namespace jaxmagi::collectives {

constexpr int kMaxNativeRanks = 64;  // of a host and a group
constexpr int kMaxArrays = 8;        // of one transfer

// One peer stores these. It overwrites them only after this rank has set `done` for the call before or, if that is a
// product with a collective, has told all ranks its address.
struct alignas(128) PeerSignals {
    uint64_t arrays[kMaxArrays];  // published addresses of the peer's arrays (transfer_params.h)
    uint64_t call_hash;
    uint64_t rows[2];  // rows that the peer expects from this rank, for even and odd epochs: when this rank compares
                       // them, the peer may already be in the next call
    uint32_t ready, done;  // last epoch in which the peer's arrays may be accessed, and in which the peer has finished
                           // accessing this rank's
};

// A product with a collective counts here: clusters of an all-gather that have begun, and the tiles and the pieces of
// rows that are claimed. The counts are zero between calls.
struct ProductCounts {
    int begun, claimed, pushed;
};

struct ControlBlock {
    uint32_t epoch;                      // of the last complete call
    uint32_t next_chunk, finished_ctas;  // of the present call
    uint64_t sent[kMaxNativeRanks];      // rows that this rank sends to each slot in the present call
    ProductCounts product;               // of the present call
    uint64_t native_bytes;               // that have moved between this rank's rows and its native peers in all calls
    PeerSignals from[kMaxNativeRanks];   // by slot
};

}  // namespace jaxmagi::collectives
