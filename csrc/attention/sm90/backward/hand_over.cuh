#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/consumer_thread.cuh"

// A consumer warpgroup's side of the two named barriers between it and the reducer.

namespace jaxmagi::sm90 {

__device__ __forceinline__ void store_shared(SharedAddress to, float4 x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

// Stores the warpgroup's part of dQ, 64 columns of a row block, in shared memory for the reducer: waits until the
// reducer has read the part before, and announces this one. With a head dimension of 96, warpgroup 1 has 32 columns.
template <typename Config, int kCount>
__device__ __forceinline__ void store_dq(BackwardMemory<Config> memory, ConsumerThread thread,
                                         const float (&dq)[kCount]) {
    static_assert(kCount * kWarpgroupThreads * 4 == Config::kDqPartBytes);
    const unsigned index = thread.index();
    named_barrier_sync(kDqEmpty + thread.warpgroup, kDqThreads);
    const SharedAddress to = memory.dq() + thread.warpgroup * Config::kDqPartBytes + index * 16;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
        if (Config::kDim % kPanelColumns == 0 or i < 4 or thread.warpgroup == 0)
            store_shared(to + i * kWarpgroupThreads * 16, {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]});
    named_barrier_arrive(kDqFull + thread.warpgroup, kDqThreads);  // the reducer has the fence
}

// Hands over dK or dV of a tile where work items have parts of a group, in parts of 64 times 64 numbers, to be added to
// the sums. `number(i)` is number i of the thread's kCount.
template <typename Config, int kCount, typename Number>
__device__ __forceinline__ void hand_over_gradient(BackwardMemory<Config> memory, ConsumerThread thread,
                                                   const Number& number) {
    constexpr int kPartCount = 32;
#pragma unroll
    for (int first = 0; first < kCount; first += kPartCount) {
        named_barrier_sync(kDqEmpty + thread.warpgroup, kDqThreads);
        const SharedAddress to = memory.dq() + thread.warpgroup * Config::kDqPartBytes + thread.index() * 16;
#pragma unroll
        for (int i = first; i < kCount and i < first + kPartCount; i += 4)
            store_shared(to + (i - first) / 4 * kWarpgroupThreads * 16,
                         {number(i), number(i + 1), number(i + 2), number(i + 3)});
        named_barrier_arrive(kDqFull + thread.warpgroup, kDqThreads);
    }
}

// Tells the reducer that there are no more steps.
template <typename Config>
__device__ __forceinline__ void stop_reducer(BackwardMemory<Config> memory, ConsumerThread thread) {
    if (thread.warpgroup != 0)
        return;
    const unsigned index = thread.index();
    named_barrier_sync(kDqEmpty, kDqThreads);
    if (index == 0)
        memory.done() = 1;
    named_barrier_arrive(kDqFull, kDqThreads);
}

}  // namespace jaxmagi::sm90
