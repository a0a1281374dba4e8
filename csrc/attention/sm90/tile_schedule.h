#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/common/macros.h"
#include "csrc/mask/band.h"

// The tile schedule of a mask: which bands touch each row tile, and the order of the tiles by cost. It is computed once
// for all layers. A schedule by keys is that of the transposed mask: its tiles are of keys, its blocks of queries, and
// in its bands keys take the place of queries.
// Tiles begin at multiples of their length. In a schedule of more tiles than that takes, one also begins with each long
// band if no other band goes on there. Long documents then share no tile with the one before, in which each would need
// steps of its own, as sequences of variable length do not in FlashAttention.
// Lengths are at most 2^30. The time grows with the squares of the numbers of bands and of tiles; for 10^7 of them it
// is seconds.

namespace jaxmagi::sm90 {

// A row tile. Only bands in [first_band, end_band) of the sorted list can touch it.
struct alignas(32) ScheduledTile {
    int tile;  // ~tile if its rows see keys from own_len on
    int first_band, end_band;
    int num_blocks;  // number of blocks of block_keys keys over all its bands: the cost
    Range rows;      // there may be none
    int unused0, unused1;

    JAXMAGI_HOST_DEVICE bool sees_received() const { return tile < 0; }
    JAXMAGI_HOST_DEVICE int index() const { return sees_received() ? ~tile : tile; }
};

// A band shrunk to the rows that see a key and the keys that are visible; all zero if there are none.
struct alignas(32) ScheduledBand {
    int q0, q1, k0, k1, lo, hi;
    int unused0, unused1;
};

struct TileScheduleParams {
    const int32_t* bands;     // [num_masks, capacity, 6]
    int num_masks, capacity;  // 1 mask, or one for each example; bands of a mask
    int q_len, kv_len;
    int own_len;  // the keys that context attention need not wait for come first; without meaning by keys
    bool by_keys;
    int tile_rows, block_keys;  // by keys: keys of a tile, queries of a block
    int num_tiles;              // of a mask: at least ceil(length / tile_rows)
    ScheduledBand* sorted;      // [num_masks, capacity]: by q0, ties as given, empty ones last
    // [num_masks, num_tiles]: by descending num_blocks, then by tile; behind them those that see
    // received keys, by ascending num_blocks, then by tile.
    ScheduledTile* tiles;
    uint64_t* workspace;        // tile_schedule_workspace_words() words that only make_tile_schedule uses
};

// A long band, with which a tile may begin, has at least so many rows. Such bands do not overlap, so that one more tile
// for each so many rows of the mask is enough.
inline constexpr int kLongBandRows = 1024;

int64_t tile_schedule_workspace_words(int num_masks, int capacity, int num_tiles);
cudaError_t make_tile_schedule(const TileScheduleParams& params, cudaStream_t stream);
cudaError_t preload_tile_schedule();  // loads the kernels; not allowed while a stream is captured

}  // namespace jaxmagi::sm90
