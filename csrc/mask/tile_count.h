#pragma once

#include <cstdint>
#include <span>

#include "csrc/mask/band.h"

namespace jaxmagi {

// The number of tiles of `rows` queries and `keys` keys that a kernel computes for a mask: full tiles, in which every
// query sees every key, and partial tiles, to which it applies the mask.
struct TileCount {
    int64_t full = 0, partial = 0;
};

// Counts the tiles of all bands. Tiles of queries begin at multiples of their size, and the keys that the queries of a
// tile see are cut into as few tiles as hold them; by keys, queries and keys are exchanged.
TileCount count_tiles(std::span<const Band> bands, int rows, int keys, bool by_keys);

}  // namespace jaxmagi
