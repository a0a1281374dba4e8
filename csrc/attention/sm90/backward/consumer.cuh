#pragma once

#include "csrc/attention/sm90/backward/zero_masked.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// The loop of a consumer warpgroup over work items. The loop of each variant over the steps of one, `run_steps`, and
// `step`, with the waits for the products for S, dP, dV, dK and dQ, are in consumer_narrow.cuh or consumer_wide.cuh.

namespace jaxmagi::sm90 {

template <int kCount, int kSize> __device__ __forceinline__ void fence_operand(float (&x)[kCount][kSize]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        fence_operand(x[i]);
}

template <int kCount> __device__ __forceinline__ void clear(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        x[i] = 0.f;
}
template <int kCount, int kSize> __device__ __forceinline__ void clear(float (&x)[kCount][kSize]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        clear(x[i]);
}

template <typename Consumer> __device__ __forceinline__ void run_consumer(Consumer consumer) {
    for (int item = 0;; ++item) {
        consumer.memory.kv_full().wait(item & 1);
        const int num_steps = uniform(consumer.memory.work_item(item).num_steps);
        if (num_steps < 0)
            break;
        typename Consumer::KeyGradient dk;
        typename Consumer::ValueGradient dv;
        clear(dk);
        clear(dv);
        if (num_steps > 0) {
            zero_masked_keys(consumer.memory, consumer.thread, consumer.memory.work_item(item));
            consumer.run_steps(dk, dv, num_steps);
        }
        consumer.store(dk, dv, item);
    }
}

}  // namespace jaxmagi::sm90
