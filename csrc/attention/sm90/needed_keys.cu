#include "csrc/attention/sm90/needed_keys.h"

#include "csrc/common/math.h"
#include "csrc/mask/band.h"

namespace jaxmagi::sm90 {
namespace {

constexpr int kWarpSize = 32, kThreads = 256, kTilesOfCta = kThreads / kWarpSize;

// A warp marks the keys of a tile, band by band.
__global__ void __launch_bounds__(kThreads) mark_needed(const __grid_constant__ NeededKeysParams params) {
    const int rank = static_cast<int>(blockIdx.x * kTilesOfCta + threadIdx.x / kWarpSize);
    if (rank >= params.num_tiles)
        return;
    const ScheduledTile tile = params.tiles[rank];
    params.sees_received[tile.index()] = tile.sees_received();
    if (not tile.sees_received())
        return;
    const Range rows = tile_range(tile.index(), params.tile_rows, params.q_len);
    const int64_t blocks = ceil_div(params.own_len, params.block_keys);
    for (int i = tile.first_band; i < tile.end_band; ++i) {
        const ScheduledBand band = params.bands[i];
        Range keys = keys_of_rows({band.q0, band.q1, band.k0, band.k1, band.lo, band.hi}, rows);
        keys.end = min(keys.end, params.own_len);
        if (is_empty(keys))
            continue;
        const int end = ceil_div(keys.end, params.block_keys);
        for (int block = keys.begin / params.block_keys + threadIdx.x % kWarpSize; block < end; block += kWarpSize)
            for (int example = 0; example < params.batch; ++example)
                params.needed[example * blocks + block] = 1;
    }
}

}  // namespace

cudaError_t find_needed_keys(const NeededKeysParams& params, cudaStream_t stream) {
    mark_needed<<<ceil_div(params.num_tiles, kTilesOfCta), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

cudaError_t preload_needed_keys() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, mark_needed);
}

}  // namespace jaxmagi::sm90
