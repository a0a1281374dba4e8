#pragma once

#include "csrc/attention/sm90/forward_consumer.cuh"
#include "csrc/attention/sm90/forward_producer.cuh"

// The forward kernel: persistent, one producer warp and Config::kConsumers consumer warpgroups a CTA. Every tile is
// finished by one CTA, so that results do not depend on which CTA takes it, and need no atomics.

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
