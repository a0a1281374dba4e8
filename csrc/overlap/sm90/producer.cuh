#pragma once

#include "csrc/common/sm90/bulk.cuh"
#include "csrc/overlap/sm90/claims.cuh"
#include "csrc/overlap/sm90/pusher.cuh"

namespace jaxmagi::overlap {

// Loads operands. One thread of a CTA is the producer.
template <typename Config> struct GemmProducer {
    GemmMemory<Config> memory;
    const GemmTensorMaps& maps;
    const GemmArguments& arguments;

    __device__ __forceinline__ void run() const {
        if constexpr (Config::kCollective == Collective::kAllGather)
            RowPusher<Config>{memory, arguments}.run();
        const int cta = cluster_rank(), steps = ceil_div(arguments.shape.inner, Config::kDepth);
        ClaimedTiles<Config> tiles(memory, arguments);
        RingPlace<Config::kStages> stage;
#pragma unroll 1
        for (TilePlace place; tiles.template next<false>(place, true);) {
            const Rows rows = rows_of(place);
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                memory.empty(stage.index).wait(stage.parity ^ 1);
                memory.full(stage.index).arrive_and_expect(Config::kStageBytes);
                tma_load(memory.x(stage.index), rows.map,
                         {step * Config::kDepth, 0, place.row + cta * kTileRows, rows.example},
                         memory.full(stage.index));
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
    // Tells where the rows of a tile are.
    struct Rows {
        const CUtensorMap& map;
        int example;
    };

    // Waits for rows of other ranks.
    __device__ __forceinline__ Rows rows_of(const TilePlace& place) const {
        const ProductShape& shape = arguments.shape;
        if constexpr (Config::kCollective == Collective::kReduceScatter)
            return {maps.x, place.example * shape.ranks + place.rank};
        if (place.rank == shape.rank)
            return {maps.x, place.example};
        const int source = among_others(place.rank, shape.rank);
        const RowBlocks blocks(shape);
        const uint32_t* const flags = reinterpret_cast<uint32_t*>(arguments.received + arguments.layout.flags);
        wait_for_addresses();
        const int block = place.example * blocks.in_example + place.row / kPairRows;
        wait_for_flag(arguments, flags + source * blocks.in_example * shape.examples + block,
                      blocks.pieces(place.row / kPairRows), place.rank);
        fence_global_for_async();
        return {maps.gathered, source * shape.examples + place.example};
    }

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
