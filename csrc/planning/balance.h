#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/tile_work.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// Rows of a chunk: usually, and at least where chunks may be halved.
struct ChunkSizes {
    int usual, least;
};

// The rank of each chunk: equally many chunks for every rank (the last may be padding), nearly equal areas, few keys to
// receive. The same on every host: the arguments decide, in a fixed order. Several masks, of layers that share the
// layout, count by their weights.
//
// Many small chunks give a search too many ways to scatter what belongs together, and cost time. So groups of adjacent
// chunks are dealt first, 8 to 16 per rank if a rank's number of chunks has such a divisor. Smaller groups follow only
// while the largest area of a rank is too large, or once if neighbours nearly balance and moving little would do;
// behind single chunks halves of them, if they are not too small. The number of owners tells what was dealt.
//
// Balanced deals of contiguous or zigzag chunks stay unless a search makes the time a percent shorter, nearly even
// ones if it does not make it shorter at all. Of several others,
// chunks dealt largest first among them, it takes the one with the shortest time of the slowest rank, if a row that
// travels takes each layer as long as `cells_per_row` cells; with 0 the one with the fewest rows. The time is that of
// cells, but kernels compute whole tiles: a rank with too many in one of the passes then gets less area.
std::vector<int> balanced_owners(std::span<const WeightedMask> masks, int length, int num_ranks, ChunkSizes chunks,
                                 int64_t cells_per_row, std::span<const TiledPass> passes);

// The token at each position when ranks, one after the other, take their chunks in ascending order; -1 for padding.
std::vector<int> token_order(std::span<const int> owners, int length, int num_ranks, int chunk);

}  // namespace jaxmagi::planning
