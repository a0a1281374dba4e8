#pragma once

#include "csrc/attention/sm90/forward/consumer.cuh"
#include "csrc/attention/sm90/forward/output_store.cuh"
#include "csrc/attention/sm90/forward/producer.cuh"
#include "csrc/attention/sm90/forward/scheduler.cuh"

// The forward kernel is persistent. A CTA has a scheduler warp, a producer warp, a thread that stores outputs, and
// Config::kConsumers consumer warpgroups. One CTA finishes a work item alone, so that results do not depend on which
// CTA claims it, and need no atomics.
//
// Schedule of a work item with blocks of keys 0 .. n - 1:
//   scheduler     writes a run of keys for each band that the tile sees. It is at most one work item ahead of the
//                 producer, and during a long one not ahead
//   producer      loads K0  Q  K1  V0  K2  V1  ...  K(n-1)  V(n-2)  V(n-1), each when its stage is free; keys come
//                 first because they are needed first
//   consumers     S0 = Q·K0, softmax;
//                 step j: S(j) = Q·K(j) and O += P(j-1)·V(j-1); softmax of S(j) overlaps with the second product; O is
//                 rescaled if needed;
//                 O += P(n-1)·V(n-1), with which row sums and log-sum-exp overlap;
//                 the output is stored, or left in shared memory for the output store.
//                 Block 0 of a warpgroup is the first that its rows see or that has a packed tail, or the last of all.
//                 A warpgroup releases the blocks before it unused, but takes its turn to issue for each, so that all
//                 warpgroups take n - 1 turns
//   output store  stores the outputs of the warpgroups one after the other
// Work items follow each other without a pause: the producer loads the next one while the consumers finish this one.
//
// Mbarriers (arrivals of a phase), who completes them, and what they protect:
//   run_full (1)  scheduler            a run and, with the first run of a work item, the work item
//   run_empty (1) producer             the run, once the loads of its keys are issued; of a short run, once its values
//                                      are padded. It also keeps work items from being overwritten (ForwardMemory)
//   q_full (1)    producer and TMA     the queries, and with them the work item; without blocks, the producer alone
//   q_empty (all consumer warps)       the queries, after their last product. Every warp has then finished the work
//                                      item before
//   k_full (1)    producer and TMA     keys of a block, and its descriptors
//   k_empty (consumer warpgroups)      the keys, after their product if there is one. Descriptors are read later, in
//                                      the softmax, but before the next product: hence twice as many as stages
//   v_full (1)    producer and TMA     values of a block; of a short run, the producer alone, after padding
//   v_empty (consumer warpgroups)      the values, after their product if there is one
//   v_loaded (1)  producer and TMA     values of a short run, for the producer itself to pad
//   out_full (warps of a warpgroup)    the output of a warpgroup, or the fact that it has none
//   out_empty (1) output store         one for each warpgroup: the place of the output, once that of the warpgroup
//                                      before was read
// Named barriers:
//   kFirstBarrier + i (warpgroup i and the one before it)  with kSchedulerBarrier: warpgroup i may issue its products
//   kFirstBarrier + i (warpgroup i)    without: all warps of the warpgroup are done with a block that they skip

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
        prefetch_tensor_map(maps.k[0]);
        prefetch_tensor_map(maps.v[0]);
        prefetch_tensor_map(maps.k_part[0]);
        prefetch_tensor_map(maps.v_part[0]);
        if (args.parts.keys.split_key != kUnbounded) {
            prefetch_tensor_map(maps.k[1]);
            prefetch_tensor_map(maps.v[1]);
        }
        memory.init_barriers();
    }
    __syncthreads();
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<Config::kProducerRegisters>();
        if (thread < 32)
            ForwardProducer<Config>{memory, maps, args}.run();
        else if (thread < 64)
            ForwardScheduler<Config>{ForwardMemory<Config>(), args}.run();
        else if (Config::kStagesOut and thread == 64 and not args.out_f32)
            ForwardOutputStore<Config>{memory, maps.out, args.first.schedule.pack_shift}.run();
    } else {
        warpgroup_reg_alloc<Config::kConsumerRegisters>();
        // Computed again: ptxas would keep `warpgroup` in local memory.
        const int consumer = uniform(threadIdx.x / kWarpgroupThreads) - 1;
        ForwardConsumer<Config>{memory, args, consumer, thread}.run();
    }
}

}  // namespace jaxmagi::sm90
