#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/attention/sm90/tile_schedule.h"

// Which keys before own_len (tile_schedule.h) the tiles see that also see received ones.

namespace jaxmagi::sm90 {

// The schedule is of one mask, by queries.
struct NeededKeysParams {
    const ScheduledBand* bands;
    const ScheduledTile* tiles;  // [num_tiles]
    int num_tiles, tile_rows, q_len, own_len;
    int block_keys;   // keys of a block
    uint8_t* needed;  // [ceil(own_len / block_keys)]: whether a tile sees keys of the block
};

cudaError_t find_needed_keys(const NeededKeysParams& params, cudaStream_t stream);
cudaError_t preload_needed_keys();  // loads the kernel; not allowed while a stream is captured

}  // namespace jaxmagi::sm90
