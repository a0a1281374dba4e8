#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/attention/sm90/tile_schedule.h"

namespace jaxmagi::sm90 {

// Says of each tile of queries of a schedule of one mask whether it sees received keys (tile_schedule.h), in the order
// of queries.
cudaError_t find_received_tiles(const ScheduledTile* tiles, int num_tiles, uint8_t* sees_received, cudaStream_t stream);
cudaError_t preload_received_tiles();  // loads the kernel; not allowed while a stream is captured

}  // namespace jaxmagi::sm90
