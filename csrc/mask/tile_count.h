#pragma once

#include <cstdint>

#include "csrc/mask/band.h"

namespace jaxmagi {

// Tiles of `rows` queries and `keys` keys that a kernel visits for a mask: those where every query sees every key, and
// the others, for which it looks at the mask.
struct TileCount {
    int64_t full = 0, partial = 0;
};

// The tiles of one tight band. Tiles of queries begin at multiples of their size, and the keys that the queries of a
// tile see are cut into as few tiles as hold them.
TileCount count_tiles(const Band& band, int rows, int keys);

}  // namespace jaxmagi
