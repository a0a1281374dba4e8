#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"
#include "csrc/planning/owners.h"
#include "csrc/planning/runs.h"

namespace jaxmagi::planning {

// The part of a band in the rows of one run of a rank.
struct Piece {
    Band band;  // tight, in global coordinates
    int run;    // index in the rank's rows
};

// The part of the mask in one rank's rows. The rows of a piece are consecutive, so the keys that it sees are too, and
// the union of the pieces' keys is exactly the set that some row needs.
struct Shard {
    Runs rows;                  // the rank's own tokens; `place` is the row of the shard
    std::vector<Piece> pieces;
    Runs remote;                // the keys that the pieces see and the rank does not own; `place` counts them
};

// Returns the shards of ranks that own these rows; `owners` is owners_of(rows_of_ranks). `bands` are tight.
std::vector<Shard> make_shards(const std::vector<Band>& bands, std::vector<Runs> rows_of_ranks, const Owners& owners);

// Sets the remote keys of a shard that has rows and pieces.
void find_remote(Shard& shard);

// Returns the remote keys in consecutive parts whose numbers of visible cells are nearly proportional to the shares,
// which are positive.
std::vector<Runs> split_remote(const Shard& shard, std::span<const int32_t> shares);

// Returns such parts by owner: first the keys of the ranks that follow this one, in a ring. All ranks then send in
// every part, whereas consecutive keys belong to few ranks.
std::vector<Runs> split_remote_by_owner(const Shard& shard, int rank, int num_ranks, const Owners& owners,
                                        std::span<const int32_t> shares);

// Returns the keys of a single attention call: the own keys, and the received ones from index `own_rows` on.
Runs keys_of_one_call(const Runs& own, const Runs& received, int own_rows);

// Returns the merged bands between the shard's rows and a buffer of keys, in local coordinates.
std::vector<Band> local_bands(const Shard& shard, const Runs& keys);

}  // namespace jaxmagi::planning
