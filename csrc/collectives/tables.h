#pragma once

// The entries of a transfer's tables, as Python lays them out (jaxmagi/planning/_spec.py).

namespace jaxmagi::collectives {

// Rows [row, row + length) go to `peer`, where they are rows [peer_row, peer_row + length). Of all rows between the two
// ranks, counted in the order of the entries, they are [slot, slot + length).
struct Send {
    int peer, slot, row, length, peer_row;
};

// Rows [row, row + length) come from `peer`.
struct Receive {
    int peer, slot, row, length;
};

}  // namespace jaxmagi::collectives
