#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"
#include "csrc/planning/owners.h"
#include "csrc/planning/runs.h"

namespace jaxmagi::planning {

// Rows of one run of a rank, and what they see.
struct Piece {
    Band band;  // tight, in global coordinates
    int run;    // index in the rank's rows
};

// One rank's part of the mask. The rows of a piece are consecutive, so the keys that it sees are too, and the union of
// the pieces' keys is exactly the set that some row needs.
struct Shard {
    Runs rows;                  // the rank's own tokens; `place` is the row of the shard
    std::vector<Piece> pieces;
    Runs remote;                // the keys that the pieces see and the rank does not own; `place` counts them
};

// The shards of ranks that own these rows (`owners` says the same the other way round). `bands` are tight.
std::vector<Shard> make_shards(const std::vector<Band>& bands, std::vector<Runs> rows_of_ranks, const Owners& owners);

// Sets the remote keys of a shard that has rows and pieces.
void find_remote(Shard& shard);

// The remote keys in consecutive parts whose numbers of visible cells are nearly as the shares, which are positive.
std::vector<Runs> split_remote(const Shard& shard, std::span<const int32_t> shares);

// The same in parts of the keys of other ranks: first those of the ranks that follow this one, in a ring. All ranks
// then send in every part, where consecutive keys would be those of few.
std::vector<Runs> split_remote_by_owner(const Shard& shard, int rank, int num_ranks, const Owners& owners,
                                        std::span<const int32_t> shares);

// The keys of one attention call: the own ones, and the received ones from index `behind` on.
Runs keys_of_one_call(const Runs& own, const Runs& received, int behind);

// The bands between the shard's rows and a buffer of keys, in local coordinates, merged.
std::vector<Band> local_bands(const Shard& shard, const Runs& keys);

}  // namespace jaxmagi::planning
