#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planning/owners.h"
#include "csrc/planning/runs.h"

namespace jaxmagi::planning {

// Rows [row, row + length) of a rank that travel to or from a peer.
struct Copy {
    int rank, peer, row, length;
};

// The same with its place in the pair's buffer.
struct PlacedCopy {
    int rank, peer, slot, row, length;
};

enum class CopyOrder { kBySlot, kByRow };

// Slots for copies, given in the order in which they fill each pair's buffer; adjacent ones are joined. Sorted by
// (rank, peer, slot) or by (rank, row).
std::vector<PlacedCopy> place_copies(std::vector<Copy> copies, CopyOrder order);

struct Transfer {
    std::vector<PlacedCopy> sends, receives;
};

// The tables of one transfer: for each rank the tokens that it receives, `place` the output row.
Transfer transfer_tables(const Owners& owners, const std::vector<const Runs*>& received);

// Rows that leave and reach a rank, within its host and between hosts.
struct Traffic {
    int64_t sent_within, sent_between, received_within, received_between;
};

// Each rank's in such a transfer; hosts have so many ranks with consecutive numbers.
std::vector<Traffic> count_traffic(const Owners& owners, const std::vector<const Runs*>& received, int ranks_per_host);

}  // namespace jaxmagi::planning
