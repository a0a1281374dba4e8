#pragma once

#include "csrc/attention/sm90/forward_consumer.cuh"
#include "csrc/attention/sm90/forward_producer.cuh"

// The forward kernel: persistent, one producer warp and Config::kConsumers consumer warpgroups a CTA. Every tile is
// finished by one CTA, so that results do not depend on which CTA takes it, and need no atomics.
//
// Schedule of a tile with blocks 0 .. n - 1:
//   producer    Q  K0  K1  V0  K2  V1  ...  K(n-1)  V(n-2)  V(n-1)   each when its place is free; keys first, they are
//                                                                    needed first
//   consumers   S0 = Q·K0, softmax;  step j: S(j) = Q·K(j) and O += P(j-1)·V(j-1), softmax of S(j) beside the second
//               product, O rescaled if the maximum moved;  O += P(n-1)·V(n-1);  epilogue
// Tiles follow each other without a pause: the producer is at the next tile while the consumers finish this one.
//
// Barriers (arrivals a phase), what completes them, and what they protect:
//   q_full (1)    producer and TMA     the queries, and the tile's message
//   q_empty (all consumer warps)       after the last product with the queries. Every warp has then read the message of
//                                      the tile before, and waited for this one: hence two messages suffice
//   k_full (1)    producer and TMA     keys of a block, and its message
//   k_empty (consumer warpgroups)      after the product with the keys. The message is read later, in the softmax, but
//                                      before the next product: hence twice as many messages as stages
//   v_full (1)    producer and TMA     values of a block; of a short run, the producer alone, after cleaning
//   v_empty (consumer warpgroups)      after the product with the values
//   v_loaded (1)  producer and TMA     values to be cleaned, for the producer itself

namespace jaxmagi::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardTensorMaps maps, const __grid_constant__ ForwardArguments args) {
    extern __shared__ char raw[];
    const ForwardMemory<Config> memory(raw);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k[true]);
        prefetch_tensor_map(maps.v[true]);
        memory.init_barriers();
    }
    __syncthreads();
    if (warpgroup == 0) {
        give_registers<Config::kProducerRegisters>();
        if (threadIdx.x < 32)
            ForwardProducer<Config>{memory, maps, args, static_cast<int>(threadIdx.x)}.run();
    } else {
        take_registers<Config::kConsumerRegisters>();
        ForwardConsumer<Config>{memory, args, warpgroup - 1, static_cast<int>(threadIdx.x % kWarpgroupThreads)}.run();
    }
}

}  // namespace jaxmagi::sm90
