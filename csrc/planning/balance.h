#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/tile_work.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// Rows of a chunk.
struct ChunkSizes {
    int usual, least;  // chunks may be halved down to `least`
};

// Returns the rank of each chunk: equally many chunks for every rank (the last may be padding), nearly equal areas, few
// keys to receive. Every host computes the same, because only the arguments decide, in a fixed order. Several masks, of
// layers that share the layout, count by their weights.
//
// Many small chunks give a search too many ways to scatter neighbours, and cost time. So groups of adjacent chunks are
// assigned first, 8 to 16 per rank if a rank's number of chunks has such a divisor. Smaller groups follow only while
// the largest area of a rank is too large, or once where contiguous or zigzag chunks are nearly balanced; after single
// chunks come their halves, down to `chunks.least`. The number of owners tells the size that was taken.
//
// A balanced contiguous or zigzag assignment stays unless a search makes the time a percent shorter; a nearly even one
// stays unless a search makes it shorter at all. Otherwise the result is the candidate with the shortest time of the
// slowest rank, where a row that travels takes each layer as long as `cells_per_row` cells; with 0 it is the one with
// the fewest rows. Candidates include chunks assigned largest first. That time counts cells, but kernels compute whole
// tiles: a rank with too many tiles in one of the passes then gets less area.
std::vector<int> balanced_owners(std::span<const WeightedMask> masks, int length, int num_ranks, ChunkSizes chunks,
                                 int64_t cells_per_row, std::span<const TiledPass> passes);

// Returns the token at each position when ranks, one after the other, take their chunks in ascending order; -1 for
// padding.
std::vector<int> token_order(std::span<const int> owners, int length, int num_ranks, int chunk);

}  // namespace jaxmagi::planning
