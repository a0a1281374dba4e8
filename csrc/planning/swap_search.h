#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "csrc/planning/rank_chunks.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// Limits that no rank should exceed.
struct Limits {
    std::vector<int64_t> areas;  // cells of each rank
    int64_t sent, received;      // rows of any rank
};

// Returns how often rows of each unit are received, summed over its rows and all ranks.
std::vector<int64_t> demand_of(const std::vector<RankChunks>& ranks, const Units& units);

// Returns the rows that each rank sends.
std::vector<int64_t> sent_rows(const std::vector<RankChunks>& ranks, std::span<const int64_t> demand);

int64_t area_above(const std::vector<RankChunks>& ranks, std::span<const int64_t> limits);
int64_t received_rows(const std::vector<RankChunks>& ranks);

// Returns how many pairs of ranks a search looks at: beyond a number of ranks, only those with near numbers.
int64_t num_pairs(int num_ranks);

// Swaps units between ranks as long as that lowers the sum of received rows, without raising an area above its limit.
// Areas and rows above their limits have a price, which rises for areas, so that they shrink where that costs few
// received rows.
//
// The best swap of each pair of ranks is made, and pairs whose ranks have not changed are skipped: the number of steps
// is bounded, and only the arguments decide.
void reduce_rows(std::vector<RankChunks>& ranks, const Units& units, const Limits& limits);

// Returns whether a swap between two ranks is kept. May change the limits of both.
using KeepSwap = std::function<bool(int rank, int other)>;

// Searches in the same way, but only pairs with an area above its limit, and takes back swaps that `keep_swap` rejects.
// For ranks that reduce_rows has found.
void reduce_areas(std::vector<RankChunks>& ranks, const Units& units, const Limits& limits, const KeepSwap& keep_swap);

}  // namespace jaxmagi::planning
