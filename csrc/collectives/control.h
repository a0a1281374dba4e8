#pragma once

#include <cstdint>

#include "csrc/collectives/peers.h"

// What ranks tell each other by stores to each other's memory. Every rank has one control block in each group that it
// belongs to, zero before the first call. All ranks of a group make the same calls in the same order, so that the number
// of a call, its epoch, needs no exchange: each counts for itself, on the device.

namespace jaxmagi::collectives {

constexpr int kMaxArrays = 8;  // that travel together

// From one peer. It is written anew only after the rank has told the peer that the call before is done.
struct alignas(128) Mailbox {
    uint64_t arrays[kMaxArrays];  // where the peer's side of the call lies, see `Place`
    uint64_t call;                // which call the peer makes
    uint64_t rows;                // how many rows the peer's tables have coming from this rank
    uint32_t ready, done;         // the last epoch whose buffers the peer has ready, or has no more need of
};

struct Control {
    uint32_t epoch;  // of the last call that is complete
    uint32_t next_chunk, finished_ctas;
    Mailbox from[kMaxRanks];
};

}  // namespace jaxmagi::collectives
