#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// The units of each rank, equally many; every unit has one rank.
using Deal = std::vector<std::vector<int>>;

Deal contiguous_deal(int count, int num_ranks);

// Each rank gets units from either end of the sequence.
Deal zigzag_deal(int count, int num_ranks);

// Units by descending area, each to the rank with the smallest area that has room (LPT, Graham 1969). As equal as areas
// get, but ranks receive nearly everything.
Deal largest_first_deal(const Units& units, int num_ranks);

// Each rank gets a run of neighbours that ends at the largest unit left, as long as `limit` allows, and another run,
// chosen to receive few rows and to use up the area: all of it is worth `eagerness` / 2 times the rows that the largest
// unit needs.
//
// Why two runs: the rows of a long document's end see so many keys that an area's worth of them is few rows. Whoever
// computes some of them receives nearly the whole document, so as few ranks as possible should, and each of them needs
// other rows that add little area and, if these are whole documents, nothing to receive.
Deal two_run_deal(const Units& units, int num_ranks, int64_t limit, int eagerness);

}  // namespace jaxmagi::planning
