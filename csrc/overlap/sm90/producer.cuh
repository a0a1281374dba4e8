#pragma once

#include "csrc/overlap/sm90/claims.cuh"

namespace jaxmagi::overlap {

// Loads operands. One thread of a CTA is the producer.
template <typename Config> struct GemmProducer {
    GemmMemory<Config> memory;
    const GemmTensorMaps& maps;
    const GemmArguments& arguments;

    __device__ __forceinline__ void run() const {
        const int cta = cluster_rank(), steps = ceil_div(arguments.shape.inner, Config::kDepth);
        ClaimedTiles<Config> tiles(memory, arguments);
        RingPlace<Config::kStages> stage;
#pragma unroll 1
        for (TilePlace place; tiles.next(place, true);) {
            const Coordinates first_row{0, 0, place.row + cta * kTileRows,
                                        place.example * arguments.shape.ranks + place.to};
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                memory.empty(stage.index).wait(stage.parity ^ 1);
                memory.full(stage.index).arrive_and_expect(Config::kStageBytes);
                tma_load(memory.x(stage.index), maps.x,
                         {step * Config::kDepth, first_row.y, first_row.z, first_row.w}, memory.full(stage.index));
                load_w(stage.index, step * Config::kDepth, place.column, cta);
                stage.next();
            }
        }
        // A CTA stays until the other one no longer arrives at its barriers.
        for (int i = 0; i < Config::kStages; ++i) {
            memory.empty(stage.index).wait(stage.parity ^ 1);
            stage.next();
        }
    }

private:
    // Loads half of the step's weights to both CTAs.
    __device__ __forceinline__ void load_w(int stage, int inner, int column, int cta) const {
        constexpr int kHalf = kTileColumns / kClusterCtas, kPanelBytes = Config::kDepth * kPanelRowBytes;
        constexpr uint16_t kAll = (1 << kClusterCtas) - 1;
        const SharedAddress to = memory.w(stage) + cta * (Config::kWBytes / kClusterCtas);
        const int first = column + cta * kHalf;
        if constexpr (Config::kTransposedW) {
            tma_multicast(to, maps.w, {inner, 0, first, 0}, memory.full(stage), kAll);
        } else {
#pragma unroll
            for (int panel = 0; panel < panels(kHalf); ++panel)
                tma_multicast(to + panel * kPanelBytes, maps.w, {first + panel * kPanelColumns, 0, inner, 0},
                              memory.full(stage), kAll);
        }
    }
};

}  // namespace jaxmagi::overlap
