#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/consumer_thread.cuh"

// Consumers write zeros over what is fully masked. Products multiply it with zeros, but 0 · NaN is NaN.

namespace jaxmagi::sm90 {

// Fills 16 bytes of a row in each panel with zeros.
template <int kColumns> __device__ __forceinline__ void zero_fill(SharedAddress to, int rows) {
#pragma unroll
    for (int panel = 0; panel < panels(kColumns); ++panel)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + panel * rows * kPanelRowBytes), "r"(0)
                     : "memory");
}

inline constexpr int kZeroVectors = kPanelRowBytes / 16;  // of a row in a panel

// Zero-fills keys and values that no query sees.
template <typename Config>
__device__ __forceinline__ void zero_masked_keys(BackwardMemory<Config> memory, ConsumerThread thread,
                                                 const BackwardWorkItem& work) {
    if (work.all_visible)
        return;
#pragma unroll 1
    for (int i = thread.index_among_consumers(); i < Config::kKeys * kZeroVectors; i += Config::kConsumerThreads) {
        const int key = i / kZeroVectors;
        if (work.visible[key / 32] >> key % 32 & 1)
            continue;
        zero_fill<Config::kDim>(memory.k() + i * 16, Config::kKeys);
        zero_fill<Config::kVDim>(memory.v() + i * 16, Config::kKeys);
    }
    fence_shared_for_async();
    named_barrier_sync(kZeroFilled, Config::kConsumerThreads);
}

// Zero-fills the fully masked rows of Q and dO of a step, if it has any. Each warpgroup fills all of them, so that none
// waits for another.
template <typename Config>
__device__ __forceinline__ void zero_masked_rows(BackwardMemory<Config> memory, ConsumerThread thread, unsigned step,
                                                 bool has_masked_rows) {
    if (has_masked_rows) {
#pragma unroll 1
        for (int i = thread.index(); i < Config::kRows * kZeroVectors; i += kWarpgroupThreads) {
            const int row = i / kZeroVectors;
            if (memory.rows(step)[row / 8].lse_log2[row % 8] != INFINITY)
                continue;
            zero_fill<Config::kDim>(memory.q(step) + i * 16, Config::kRows);
            zero_fill<Config::kVDim>(memory.dout(step) + i * 16, Config::kRows);
        }
        fence_shared_for_async();
        named_barrier_sync(kRowsZeroFilled + thread.warpgroup, kWarpgroupThreads);
    }
}

}  // namespace jaxmagi::sm90
