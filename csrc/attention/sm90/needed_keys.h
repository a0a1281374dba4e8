#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/attention/sm90/tile_schedule.h"

// find_needed_keys() tells which tiles see received keys, those from own_len on (tile_schedule.h), and which keys
// before own_len these tiles see.

namespace jaxmagi::sm90 {

// The schedule is of one mask, which all examples of the batch have, by queries.
struct NeededKeysParams {
    const ScheduledBand* bands;
    const ScheduledTile* tiles;  // [num_tiles]
    int num_tiles, tile_rows, q_len, own_len;
    int block_keys, batch;   // block_keys: keys of a block
    uint8_t* needed;         // [batch, ceil(own_len / block_keys)]: 1 where a tile with received keys sees keys of the
                             // block; others stay as they are
    uint8_t* sees_received;  // [num_tiles]: whether the tile of these queries sees received keys
};

cudaError_t find_needed_keys(const NeededKeysParams& params, cudaStream_t stream);
cudaError_t preload_needed_keys();  // loads the kernel; not allowed while a stream is captured

}  // namespace jaxmagi::sm90
