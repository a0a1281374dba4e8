#pragma once

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

// Returns the merged bands between the shard's rows and the keys that it needs, in local coordinates: its own ones, of
// which there are `own_rows` with padding, and behind them the remote ones.
std::vector<Band> local_bands(const Shard& shard, int own_rows);

}  // namespace jaxmagi::planning
