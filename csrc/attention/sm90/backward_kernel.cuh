#pragma once

#include "csrc/attention/sm90/backward_consumer.cuh"
#include "csrc/attention/sm90/backward_producer.cuh"
#include "csrc/attention/sm90/backward_reducer.cuh"
#include "csrc/attention/sm90/backward_scheduler.cuh"
#include "csrc/attention/sm90/backward_wide_consumer.cuh"

#include <type_traits>

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
        give_registers<Config::kProducerRegisters>();
        const int lane = thread % 32;
        const int warp = uniform(thread / 32);
        if (warp == 0 and elect_lane())
            BackwardProducer<Config>{memory, maps, args}.run();
        else if (warp == 1)
            BackwardReducer<Config>{memory, args, lane}.run();
        else if (warp == 2)
            BackwardScheduler<Config>{memory, args, lane}.run();
    } else {
        take_registers<Config::kConsumerRegisters>();
        // Found again, or ptxas would keep it in local memory in between.
        const int consumer = uniform(threadIdx.x / kWarpgroupThreads) - 1;
        using Consumer =
            std::conditional_t<Config::kWide, BackwardWideConsumer<Config>, BackwardConsumer<Config>>;
        Consumer{memory, args, consumer, thread}.run();
    }
}

}  // namespace jaxmagi::sm90
