#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// The units of each rank, equally many; every unit has one rank.
using Assignment = std::vector<std::vector<int>>;

Assignment contiguous_assignment(int count, int num_ranks);

// Gives each rank units from both ends of the sequence.
Assignment zigzag_assignment(int count, int num_ranks);

// Gives units by descending area, each to the rank with the smallest area that has room (LPT, Graham 1969). Areas are
// as equal as they get, but ranks receive nearly all keys.
Assignment largest_first_assignment(const Units& units, int num_ranks);

// Gives each rank a run of neighbours that ends at the largest unit left, as long as `limit` allows, and a second run,
// chosen to receive few rows and to use up the area: a full area is worth `area_weight` / 2 times the rows that the
// largest unit needs. The weights 1 and 2 were chosen by trial and matter little: rows differ by 5 %.
//
// Two runs are needed because the last rows of a long document see so many keys that few of them fill a rank's area. A
// rank that computes some of them receives nearly the whole document, so as few ranks as possible should, and each of
// them needs other rows that add little area and, if they are whole documents, no received rows.
Assignment two_run_assignment(const Units& units, int num_ranks, int64_t limit, int area_weight);

}  // namespace jaxmagi::planning
