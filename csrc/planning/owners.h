#pragma once

#include <vector>

#include "csrc/planning/runs.h"

namespace jaxmagi::planning {

// Which rank owns which tokens: the runs of all ranks in the order of their tokens.
struct Owners {
    Runs runs;                 // `place` is the row of the rank's shard
    std::vector<int> ranks;    // of each run
    std::vector<int> indices;  // of each run among the rank's

    int index_of(const Run& run) const { return static_cast<int>(&run - runs.data()); }
};

Owners owners_of(const std::vector<Runs>& rows_of_ranks);

}  // namespace jaxmagi::planning
