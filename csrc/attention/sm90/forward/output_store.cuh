#pragma once

#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/tma.cuh"

// Stores what the warpgroups leave in shared memory, one after the other, so that none of them has to wait until its
// output was read.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardOutSender {
    ForwardMemory<Config> memory;
    const CUtensorMap& map;
    int pack_shift;

    // By one thread.
    __device__ __forceinline__ void run() const {
#pragma unroll 1
        for (int turn = 0, num_blocks = 0; num_blocks >= 0; ++turn) {
#pragma unroll 1
            for (int warpgroup = 0; warpgroup < Config::kConsumers; ++warpgroup) {
                memory.out_full().wait(memory.out_full_parity(turn, warpgroup));
                const TileMessage& tile = memory.tile_message(turn);
                num_blocks = tile.num_blocks;
                if (num_blocks > 0)
                    store(tile, warpgroup);
                memory.out_empty((warpgroup + 1) % Config::kConsumers).arrive();
            }
        }
    }

private:
    __device__ __forceinline__ void store(const TileMessage& tile, int warpgroup) const {
        const int position = tile.row + (warpgroup * 64 >> pack_shift);
#pragma unroll
        for (int panel = 0; panel < panels(Config::kVDim); ++panel)
            tma_store(map, {panel * kPanelColumns, tile.head, position, tile.example},
                      memory.out() + panel * 64 * kPanelRowBytes);
        bulk_commit();
        bulk_wait_read<0>();
    }
};

}  // namespace jaxmagi::sm90
