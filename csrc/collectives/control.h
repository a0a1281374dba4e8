#pragma once

#include <cstdint>

#include "csrc/collectives/peers.h"

// What ranks tell each other by stores to each other's memory. Every rank has one control block in each group that it
// belongs to, zero before the first call. All ranks of a group make the same calls in the same order, so that the
// number of a call, its epoch, needs no exchange: each counts for itself, on the device.

namespace jaxmagi::collectives {

constexpr int kMaxArrays = 8;  // that travel together

// From one peer, who writes it anew after the rank has told it that the call before is done.
struct alignas(128) Mailbox {
    uint64_t arrays[kMaxArrays];  // where the peer's side of the call lies
    uint64_t call;                // which call the peer makes
    uint64_t rows[2];             // how many rows the peer's tables have coming from this rank, of even and odd epochs:
                                  // they are looked at when the peer may be at the next call
    uint32_t ready, done;         // the last epoch whose buffers the peer has ready, or has no more need of
};

struct Control {
    uint32_t epoch;  // of the last call that is complete
    uint32_t next_chunk, finished_ctas;
    uint64_t sent[kMaxRanks];  // how many rows the tables of the present call have going to each peer
    Mailbox from[kMaxRanks];
};

}  // namespace jaxmagi::collectives
