#pragma once

#include "csrc/overlap/sm90/claims.cuh"
#include "csrc/overlap/sm90/consumer.cuh"
#include "csrc/overlap/sm90/mover.cuh"
#include "csrc/overlap/sm90/producer.cuh"

// A product of matrices with a reduce-scatter or an all-gather. It is persistent. Two CTAs of a cluster compute tiles
// below each other, and share the weights that both read: each loads half of them to both.
//
// Warps of a CTA:
//   producer           one thread, loads operands step by step of kDepth numbers of the inner dimension
//   movers             a warp for each consumer, move panels of 64 columns from and to its buffers
//   scheduler          one thread of the cluster claims tiles (tiles.cuh)
//   consumers          two warpgroups, each multiplies 64 rows
//
// Mbarriers (arrivals of a phase):
//   full (1)           the stage has its bytes, those that the other CTA loads among them
//   empty (consumer warps of both CTAs)  the stage may be overwritten in both CTAs
//   loaded (1)         a buffer has a panel of another rank
//   piece_loaded (1)   a piece of the rows that a CTA pushes before it computes is there
//   begun (1)          it is known how many clusters had begun before
//   pushed (producers of both CTAs)  the memory of stages is free of pieces
//   claimed (1)        a claimed tile is known
//   read (producers, movers and consumer warps of both CTAs)  all have read it
// Named barriers, between a consumer and its mover:
//   buffer_free        at the start of a tile, all buffers are free; later, the one whose place an item takes
//   buffer_filled      a buffer is filled; one for each
//
// A tile for another rank or, of an all-gather, any tile (item: a panel):
//                    free -> consumer writes -> filled -> mover stores it -> free ...
// A tile of a reduce-scatter for this rank (item: a panel of one of the other ranks):
//                    mover loads -> loaded -> consumer adds -> filled -> mover stores the panel's sums, if it was the
//                    last rank of the panel -> mover loads the item that takes its place ...

namespace jaxmagi::overlap {

template <typename Config> __device__ __forceinline__ void init_barriers(const GemmMemory<Config>& memory) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
        memory.full(stage).init(1);
        memory.empty(stage).init(Config::kConsumers * (kWarpgroupThreads / 32) * kClusterCtas);
    }
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer)
        for (int buffer = 0; buffer < Config::kBuffers; ++buffer)
            memory.loaded(consumer, buffer).init(1);
    for (int claim = 0; claim < Config::kClaims; ++claim) {
        memory.claimed(claim).init(1);
        memory.read(claim).init(ClaimedTiles<Config>::kReaders * kClusterCtas);
    }
    if constexpr (Config::kCollective == Collective::kAllGather) {
        for (int buffer = 0; buffer < Config::kPushBuffers; ++buffer)
            memory.piece_loaded(buffer).init(1);
        memory.pushed().init(kClusterCtas);
        memory.begun().init(1);
    }
    fence_mbarrier_init();
}

template <typename Config>
__global__ void __cluster_dims__(kClusterCtas) __launch_bounds__(Config::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmTensorMaps maps, const __grid_constant__ GemmArguments arguments) {
    extern __shared__ char raw[];
    const GemmMemory<Config> memory(raw);
    const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads), thread = threadIdx.x % kWarpgroupThreads;
    if (threadIdx.x == 0) {
        launch_dependent_grids();  // which wait for the end of this one
        prefetch_tensor_map(maps.x);
        prefetch_tensor_map(maps.w);
        prefetch_tensor_map(maps.y);
        if (Config::kCollective == Collective::kAllGather)
            prefetch_tensor_map(maps.gathered);
        init_barriers<Config>(memory);
    }
    __syncthreads();
    cluster_sync();
    if (warpgroup > 0) {
        warpgroup_reg_alloc<Config::kConsumerRegisters>();
        GemmConsumer<Config>{memory, arguments, warpgroup - 1, thread}.run();
    } else {
        warpgroup_reg_dealloc<Config::kProducerRegisters>();
        const int warp = uniform(thread / 32);
        if (warp == 0) {
            if (elect_lane())
                GemmProducer<Config>{memory, maps, arguments}.run();
        } else if (warp <= Config::kConsumers) {
            GemmMover<Config>{memory, maps, arguments, warp - 1}.run();
        } else if (cluster_rank() == 0 and elect_lane()) {
            TileScheduler<Config>{memory, arguments}.run();
        }
    }
    __syncwarp();
    cluster_sync();
}

}  // namespace jaxmagi::overlap
