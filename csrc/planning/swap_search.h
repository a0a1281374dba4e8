#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planning/hand.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// What a search makes smaller: first the area of ranks above the limit, then the rows that ranks receive.
struct Quality {
    int64_t excess, received;
    auto operator<=>(const Quality&) const = default;
};

Quality quality_of(const std::vector<Hand>& hands, int64_t limit);

// How many pairs of ranks a search looks at: beyond a number of ranks, only those with near numbers.
int64_t num_pairs(int num_ranks);

// Swaps units between ranks as long as that lowers the sum of received rows, without raising an area above `limit`;
// while areas are above it, the excess has a price that rises, so that it goes where that costs few rows.
//
// Ranks are looked at in pairs, each pair's best swap is made, and pairs whose ranks have not changed are left alone:
// the number of steps is bounded, and nothing but the arguments decides.
void reduce_rows(std::vector<Hand>& hands, const Units& units, int64_t limit);

}  // namespace jaxmagi::planning
