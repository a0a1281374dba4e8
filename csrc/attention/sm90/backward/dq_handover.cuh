#pragma once

#include "csrc/attention/sm90/backward/config.cuh"

// A consumer warpgroup's side of the barriers of the reducer.

namespace jaxmagi::sm90 {

template <typename Config> struct DqSender {
    static constexpr int kFragmentBytes = kWarpgroupThreads * 16;

    BackwardMemory<Config> memory;
    int warpgroup, thread;

    // 64 columns of a row block. With a head dimension of 96, the second warpgroup has 32 columns.
    template <int kCount> __device__ __forceinline__ void send(const float (&dq)[kCount]) const {
        static_assert(kCount * kWarpgroupThreads * 4 == Config::kDqPartBytes);
        named_barrier_sync(kDqEmpty + warpgroup, kDqThreads);
        const SharedAddress to = memory.dq() + warpgroup * Config::kDqPartBytes + thread * 16;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
            if (Config::kDim % kPanelColumns == 0 or i < 4 or warpgroup == 0)
                store(to + i * kFragmentBytes, dq, 4 * i);
        fence_shared_for_async();
        named_barrier_arrive(kDqFull + warpgroup, kDqThreads);
    }

    __device__ __forceinline__ void finish() const {
        if (warpgroup != 0)
            return;
        named_barrier_sync(kDqEmpty, kDqThreads);
        if (thread == 0)
            memory.done() = 1;
        named_barrier_arrive(kDqFull, kDqThreads);
    }

private:
    template <int kCount>
    __device__ __forceinline__ static void store(SharedAddress to, const float (&x)[kCount], int i) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]),
                     "f"(x[i + 3])
                     : "memory");
    }
};

template <int kCount> __device__ __forceinline__ void clear(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        x[i] = 0.f;
}

}  // namespace jaxmagi::sm90
