#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planning/owners.h"
#include "csrc/planning/runs.h"

namespace jaxmagi::planning {

// Rows [row, row + length) of a rank that become the rows [destination_row, destination_row + length) of another.
struct Copy {
    int source, destination, row, destination_row, length;
};

// The same for the rank that sends, with its place in the pair's buffer. The peer has the rows from `peer_row` on.
struct Send {
    int rank, peer, slot, row, length, peer_row;
};

// And for the rank that receives.
struct Receive {
    int rank, peer, slot, row, length;
};

// Sends by (rank, peer, slot), receives by (rank, row).
struct Transfer {
    std::vector<Send> sends;
    std::vector<Receive> receives;
};

// Slots for copies, of a row or more each, given in the order in which they fill each pair's buffer. Adjacent ones are
// joined: sends where the rows of both ranks go on, receives where those of the receiving rank do.
Transfer place_copies(std::vector<Copy> copies);

// The tables of one transfer: for each rank the tokens that it receives, `place` the output row.
Transfer transfer_tables(const Owners& owners, const std::vector<const Runs*>& received);

// Rows that leave and reach a rank, within its host and between hosts.
struct Traffic {
    int64_t sent_within, sent_between, received_within, received_between;
};

// Each rank's in such a transfer; hosts have so many ranks with consecutive numbers.
std::vector<Traffic> count_traffic(const Owners& owners, const std::vector<const Runs*>& received, int ranks_per_host);

}  // namespace jaxmagi::planning
