#pragma once

#include <cstdint>
#include <span>

#include "csrc/mask/band.h"

namespace jaxmagi {

// Tiles of `rows` queries and `keys` keys that a kernel visits for a mask: those where every query sees every key, and
// the others, for which it looks at the mask.
struct TileCount {
    int64_t full = 0, partial = 0;
};

// The tiles of all bands. Tiles of queries begin at multiples of their size, and the keys that the queries of a tile
// see are cut into as few tiles as hold them; by keys it is the other way round.
TileCount count_tiles(std::span<const Band> bands, int rows, int keys, bool by_keys);

}  // namespace jaxmagi
