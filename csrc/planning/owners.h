#pragma once

#include <vector>

#include "csrc/planning/runs.h"

namespace jaxmagi::planning {

// The owner of each token: the runs of all ranks in the order of their tokens.
struct Owners {
    Runs runs;                 // `place` is the row in the owner's shard
    std::vector<int> ranks;    // owner of each run
    std::vector<int> indices;  // index of each run among its owner's runs

    int index_of(const Run& run) const { return static_cast<int>(&run - runs.data()); }
};

Owners owners_of(const std::vector<Runs>& rows_of_ranks);

}  // namespace jaxmagi::planning
