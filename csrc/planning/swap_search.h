#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "csrc/planning/hand.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// What no rank should exceed: cells, of each rank, and rows that it sends and receives.
struct Limits {
    std::vector<int64_t> areas;
    int64_t sent, received;
};

// Rows of each unit that ranks receive, all ranks together.
std::vector<int64_t> demand_of(const std::vector<Hand>& hands, const Units& units);

// Rows that each rank sends.
std::vector<int64_t> sent_rows(const std::vector<Hand>& hands, std::span<const int64_t> demand);

int64_t area_above(const std::vector<Hand>& hands, std::span<const int64_t> limits);
int64_t received_rows(const std::vector<Hand>& hands);

// How many pairs of ranks a search looks at: beyond a number of ranks, only those with near numbers.
int64_t num_pairs(int num_ranks);

// Swaps units between ranks as long as that lowers the sum of received rows, without raising an area above its limit;
// while areas and rows of ranks are above theirs, the excess has a price, which rises for areas, so that it goes where
// that costs few received rows.
//
// Ranks are looked at in pairs, each pair's best swap is made, and pairs whose ranks have not changed are left alone:
// the number of steps is bounded, and nothing but the arguments decides.
void reduce_rows(std::vector<Hand>& hands, const Units& units, const Limits& limits);

// Whether an exchange between two ranks may stay. May change the limits of both.
using MayStay = std::function<bool(int rank, int other)>;

// The same, but looks only at pairs with an area above its limit, and takes back what may not stay: for hands that such
// a search has found.
void reduce_areas(std::vector<Hand>& hands, const Units& units, const Limits& limits, const MayStay& may_stay);

}  // namespace jaxmagi::planning
