#include "csrc/attention/sm90/received_tiles.h"

#include "csrc/common/math.h"

namespace jaxmagi::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    mark_received_tiles(const ScheduledTile* tiles, int num_tiles, uint8_t* sees_received) {
    if (const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); i < num_tiles)
        sees_received[tiles[i].index()] = tiles[i].sees_received();
}

}  // namespace

cudaError_t find_received_tiles(const ScheduledTile* tiles, int num_tiles, uint8_t* sees_received,
                                cudaStream_t stream) {
    mark_received_tiles<<<ceil_div(num_tiles, kThreads), kThreads, 0, stream>>>(tiles, num_tiles, sees_received);
    return cudaGetLastError();
}

cudaError_t preload_received_tiles() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, mark_received_tiles);
}

}  // namespace jaxmagi::sm90
