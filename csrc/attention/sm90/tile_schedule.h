#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// The plan of a mask: what every layer's kernels would otherwise find out again. A plan by keys is that of the
// transposed mask: its tiles are of keys, its blocks of queries, and in its bands keys have the place of queries.
// Lengths are at most 2^30; the time grows with the squares of the numbers of bands and of tiles, which is seconds
// for 10^7 of them.

namespace jaxmagi::sm90 {

// A row tile. Bands outside [first_band, end_band) of the sorted list do not touch it; those inside may.
struct alignas(16) ScheduledTile {
    int tile;
    int first_band, end_band;
    int num_blocks;  // of block_keys keys, over all its bands: the cost, by which tiles are ordered
};

// A band shrunk to the rows that see something and the keys that are seen; all zero if there are none.
struct alignas(32) ScheduledBand {
    int q0, q1, k0, k1, lo, hi;
    int unused0, unused1;
};

struct TileScheduleParams {
    const int32_t* bands;  // [plans, capacity, 6]
    int num_masks, capacity;   // plans: 1 or the batch size
    int q_len, kv_len;
    bool by_keys;
    int tile_rows, block_keys;  // by keys: keys of a tile, queries of a block
    ScheduledBand* sorted;   // [plans, capacity]: by q0, ties as given, empty ones last
    ScheduledTile* tiles;    // [plans, ceil(length / tile_rows)]: by descending num_blocks, ties by ascending tile
    uint64_t* workspace;   // tile_schedule_workspace_words() of them; nobody else reads it
};

int64_t tile_schedule_workspace_words(int num_masks, int capacity, int length, int tile_rows);
cudaError_t make_tile_schedule(const TileScheduleParams& params, cudaStream_t stream);
cudaError_t preload_tile_schedule();  // loads the kernels; not allowed while a stream is captured

}  // namespace jaxmagi::sm90
