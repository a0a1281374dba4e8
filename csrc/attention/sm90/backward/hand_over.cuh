#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/consumer_thread.cuh"

// A consumer warpgroup's side of the two named barriers between it and the reducer.

namespace jaxmagi::sm90 {

__device__ __forceinline__ void store_shared(SharedAddress to, float4 x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

// Stores numbers of the thread, `number(i)` for i below `count`, at most kMost, in the warpgroup's part of shared
// memory: waits until the reducer has read what was there before, and announces this.
template <int kMost, typename Config, typename Number>
__device__ __forceinline__ void hand_over_part(BackwardMemory<Config> memory, ConsumerThread thread, int count,
                                               const Number& number) {
    static_assert(kMost * kWarpgroupThreads * 4 <= Config::kPartBytes);
    const unsigned index = thread.index();
    named_barrier_sync(kPartEmpty + thread.warpgroup, kPartThreads);
    const SharedAddress to = memory.part(thread.warpgroup) + index * 16;
#pragma unroll
    for (int i = 0; i < kMost; i += 4)
        if (i < count)
            store_shared(to + i / 4 * kWarpgroupThreads * 16, {number(i), number(i + 1), number(i + 2), number(i + 3)});
    named_barrier_arrive(kPartFull + thread.warpgroup, kPartThreads);  // the reducer has the fence
}

// Hands over the warpgroup's part of dQ. With a head dimension of 96, warpgroup 1 has 32 columns instead of 64.
template <typename Config, int kCount>
__device__ __forceinline__ void hand_over_dq(BackwardMemory<Config> memory, ConsumerThread thread,
                                             const float (&dq)[kCount]) {
    static_assert(kCount * kWarpgroupThreads * 4 == Config::kPartBytes);
    const bool whole = Config::kDim % kPanelColumns == 0 or thread.warpgroup == 0;
    hand_over_part<kCount>(memory, thread, whole ? kCount : kCount / 2, [&](int i) { return dq[i]; });
}

// Hands over dK or dV of a tile in as many parts as KeySums has passes. `number(i)` is number i of the thread's kCount.
template <int kCount, typename Config, typename Number>
__device__ __forceinline__ void hand_over_gradient(BackwardMemory<Config> memory, ConsumerThread thread,
                                                   const Number& number) {
    constexpr int kPartCount = 64 * 64 / kWarpgroupThreads;
#pragma unroll
    for (int first = 0; first < kCount; first += kPartCount)
        hand_over_part<kPartCount>(memory, thread, kCount - first, [&](int i) { return number(first + i); });
}

}  // namespace jaxmagi::sm90
