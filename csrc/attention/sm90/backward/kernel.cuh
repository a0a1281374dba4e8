#pragma once

#include "csrc/attention/sm90/backward/consumer_rs.cuh"
#include "csrc/attention/sm90/backward/consumer_ss.cuh"
#include "csrc/attention/sm90/backward/consumer_wide.cuh"
#include "csrc/attention/sm90/backward/producer.cuh"
#include "csrc/attention/sm90/backward/reducer.cuh"
#include "csrc/attention/sm90/backward/scheduler.cuh"

// The backward kernel: persistent; a scheduler warp, a producer warp, a reducer warp and Config::kConsumers consumer
// warpgroups a CTA. A CTA takes tiles of keys. Their dK and dV stay in registers over all bands and all query heads
// of the group and are stored once; dQ of each step is added to sums in global memory, which another kernel converts.
//
// A step is a block of queries of one head that sees keys of the tile. Schedule of a tile with steps 0 .. n - 1:
//   scheduler   a run of blocks for each band; one tile ahead of the producer
//   producer    K V | Q0 dO0 | Q1 dO1 | ...   each when its place is free
//   consumers   S(0) = K·Q0, dP(0) = V·dO0, P(0), dS(0)
//               step j, 80 queries (BackwardSsConsumer):
//                        dV += P(j)·dO(j);  dQ = dS(j)·K;  dK += dS(j)·Q(j), dQ handed over beside it;
//                        S(j+1) = K·Q(j+1);  dP(j+1) = V·dO(j+1), P(j+1) beside it;  dS(j+1)
//               step j with kLateDk (BackwardRsConsumer):
//                        dV += P(j)·dO(j);  dQ = dS(j)·K;  S(j+1) = K·Q(j+1), dQ handed over beside it;
//                        dP(j+1) = V·dO(j+1), P(j+1) beside it;  dK += dS(j)·Q(j), dS(j+1) beside it
//               the last step without S and dP;  stores
//               The others have dK before S(j+1), beside which (with three warpgroups, before which) dQ is handed over.
//   reducer     adds dQ(j) to the sums, while the consumers are at step j + 1
//
// Mbarriers (arrivals a phase), what completes them, and what they protect:
//   run_full (1)   scheduler          a run, and with the first of a tile the tile's message
//   run_empty (1)  producer           after the last block of the run is on its way. It also keeps the messages of
//                                     tiles from being overwritten: see BackwardMemory
//   kv_full (1)    producer and TMA   keys and values of a tile; of one that nobody sees, and at the end, the producer
//   kv_empty (all consumer warps)     after the last product of the tile, and so after the stores of the tile before
//   q_full (1)     producer and TMA   queries of a step, what is known of them, and the step's message
//   q_empty (consumer warpgroups)     after the product for dK, which may end in the next step
//   dout_full (1)  producer and TMA   cotangents of a step
//   dout_empty (consumer warpgroups)  after the product for dV
// Named barriers:
//   kLogitsWritten (consumers)  dS of all keys of the tile is there for dQ; in wide kernels P too, for dV. There are 2
//                               places for dS: that of step j is written again in step j + 2, when all have waited for
//                               dQ(j) before they came to the barrier of step j + 1, and each for its own dK(j)
//   kLogitsRead (consumers)     wide kernels, which have one place: the products of the step before are done
//   kRowsCleaned (consumers)    what nobody may see was overwritten with zeros
//   kDqEmpty, kDqFull (a warpgroup and the reducer)  the warpgroup's part of dQ was read; is there. The reducer is the
//                               first to arrive

namespace jaxmagi::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardTensorMaps maps, const __grid_constant__ BackwardArguments args) {
    extern __shared__ char raw[];
    const BackwardMemory<Config> memory(raw);
    const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
    const int thread = threadIdx.x % kWarpgroupThreads;
    if (warpgroup == 0 and thread == 0) {
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.dout);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
        memory.init_barriers();
    }
    __syncthreads();
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<Config::kProducerRegisters>();
        const int lane = thread % 32;
        const int warp = uniform(thread / 32);
        if (warp == 0 and elect_lane())
            BackwardProducer<Config>{memory, maps, args}.run();
        else if (warp == 1)
            BackwardReducer<Config>{memory, args, lane}.run();
        else if (warp == 2)
            BackwardScheduler<Config>{memory, args, lane}.run();
    } else {
        warpgroup_reg_alloc<Config::kConsumerRegisters>();
        // Computed again: ptxas would keep `warpgroup` in local memory.
        const ConsumerThread consumer{uniform(threadIdx.x / kWarpgroupThreads) - 1, thread};
        if constexpr (Config::kWide)
            run_consumer(BackwardConsumerWide<Config>{memory, args, consumer});
        else if constexpr (Config::kRows == 80)
            run_consumer(BackwardConsumerSs<Config>{memory, args, consumer});
        else
            run_consumer(BackwardConsumerRs<Config>{memory, args, consumer});
    }
}

}  // namespace jaxmagi::sm90
