#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planning/owners.h"
#include "csrc/planning/runs.h"

namespace jaxmagi::planning {

// Rows [row, row + length) of a rank that become the rows [destination_row, destination_row + length) of another.
struct RowCopy {
    int source, destination, row, destination_row, length;
};

// Rows that `rank` sends: [row, row + length) go to the slots from `slot` on of the pair's buffer, and become the rows
// of `peer` from `peer_row` on.
struct SentRange {
    int rank, peer, slot, row, length, peer_row;
};

// Rows [row, row + length) that `rank` receives from the slots from `slot` on of `peer`.
struct ReceivedRange {
    int rank, peer, slot, row, length;
};

// The ranges that all ranks send and receive in one transfer.
struct TransferTables {
    std::vector<SentRange> sends;         // by (rank, peer, slot)
    std::vector<ReceivedRange> receives;  // by (rank, row)
};

// Assigns slots to copies, of a row or more each, in the order in which they fill each pair's buffer. Adjacent ranges
// are joined where the rows of both ranks are consecutive. Both tables have the same ranges, so that the two ranks of a
// pair cut rows into the same messages (csrc/collectives/messages.h).
TransferTables place_copies(std::vector<RowCopy> copies);

// Returns the tables of one transfer. `received` has the tokens that each rank receives; their `place` is the output
// row.
TransferTables transfer_tables(const Owners& owners, const std::vector<const Runs*>& received);

// Rows that a rank sends and receives, within its host and between hosts.
struct Traffic {
    int64_t sent_within, sent_between, received_within, received_between;
};

// Returns the traffic of each rank in such a transfer. `ranks_per_host` consecutive ranks share a host.
std::vector<Traffic> count_traffic(const Owners& owners, const std::vector<const Runs*>& received, int ranks_per_host);

}  // namespace jaxmagi::planning
