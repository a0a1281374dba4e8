#pragma once

#include <span>
#include <vector>

#include "csrc/planning/first_deal.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// How a kernel works through a mask; see csrc/mask/tile_count.h.
struct TiledPass {
    int rows, keys;
    bool by_keys;
    double partial_cost;  // of a tile with invisible cells, in tiles without
};

// What each rank computes, in tiles, over the mean of all ranks: the largest of these shares in any pass. The tiles are
// those of one attention call over all keys of a rank.
std::vector<double> shares_of_tiles(std::span<const WeightedMask> masks, const Deal& deal, const Units& units,
                                    std::span<const TiledPass> passes);

}  // namespace jaxmagi::planning
