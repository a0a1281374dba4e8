#pragma once

#include "csrc/attention/sm90/forward/consumer.cuh"
#include "csrc/attention/sm90/forward/output_store.cuh"
#include "csrc/attention/sm90/forward/producer.cuh"
#include "csrc/attention/sm90/forward/scheduler.cuh"

// The forward kernel: persistent, one scheduler warp, one producer warp, one thread that sends outputs, and
// Config::kConsumers consumer warpgroups a CTA. Every tile is finished by one CTA, so that results do not depend on
// which CTA takes it, and need no atomics.
//
// Schedule of a tile with blocks 0 .. n - 1:
//   scheduler   runs of keys, one for each band that the tile sees; ahead of the producer, but for long tiles not far
//   producer    K0  Q  K1  V0  K2  V1  ...  K(n-1)  V(n-2)  V(n-1)   each when its place is free; keys first, they are
//                                                                    needed first
//   consumers   S0 = Q·K0, softmax;  step j: S(j) = Q·K(j) and O += P(j-1)·V(j-1), softmax of S(j) beside the second
//               product, O rescaled if a reference moved;  O += P(n-1)·V(n-1), sums and log-sum-exp beside it;
//               outputs stored, or left to the sender where it has a place for them.
//               Block 0 is the first that the rows of the warpgroup see or that holds keys of two runs, or the
//               last of all: it gives back the ones before untouched, but takes its turn for each, so that all
//               warpgroups take n - 1 turns.
// Tiles follow each other without a pause: the producer is at the next tile while the consumers finish this one.
//
// Barriers (arrivals a phase), what completes them, and what they protect:
//   run_full (1)  scheduler            a run, and with the first of a tile the tile's message
//   run_empty (1) producer             after the keys of the run are on their way; of a short run, after cleaning.
//                                      It also keeps the messages of tiles from being overwritten: see ForwardMemory
//   q_full (1)    producer and TMA     the queries, and so the tile's message; without blocks, the producer alone
//   q_empty (all consumer warps)       after the last product with the queries. Every warp has then finished the tile
//                                      before
//   k_full (1)    producer and TMA     keys of a block, and its messages
//   k_empty (consumer warpgroups)      after the product with the keys, if any. Messages are read later, in the
//                                      softmax, but before the next product: hence twice as many of them as stages
//   v_full (1)    producer and TMA     values of a block; of a short run, the producer alone, after cleaning
//   v_empty (consumer warpgroups)      after the product with the values, if any
//   v_loaded (1)  producer and TMA     values to be cleaned, for the producer itself
//   out_full (warps of a warpgroup)    the output of a warpgroup, or that it has none for this tile, or no more tiles
//   out_empty (1) sender               of each warpgroup: when the output of the one before it was read

namespace jaxmagi::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardTensorMaps maps, const __grid_constant__ ForwardArguments args) {
    extern __shared__ char raw[];
    const ForwardMemory<Config> memory(raw);
    const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
    const int thread = threadIdx.x % kWarpgroupThreads;
    if (warpgroup == 0 and thread == 0) {
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
        prefetch_tensor_map(maps.k_part);
        prefetch_tensor_map(maps.v_part);
        memory.init_barriers();
    }
    __syncthreads();
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<Config::kProducerRegisters>();
        if (thread < 32)
            ForwardProducer<Config>{memory, maps, args}.run();
        else if (thread < 64)
            ForwardScheduler<Config>{memory, args}.run();
        else if (Config::kStagesOut and thread == 64 and not args.out_f32)
            ForwardOutSender<Config>{memory, maps.out, args.schedule.pack_shift}.run();
    } else {
        warpgroup_reg_alloc<Config::kConsumerRegisters>();
        // Found again, or ptxas would keep it in local memory in between.
        const int consumer = uniform(threadIdx.x / kWarpgroupThreads) - 1;
        ForwardConsumer<Config>{memory, args, consumer, thread}.run();
    }
}

}  // namespace jaxmagi::sm90
