#pragma once

#include "csrc/attention/sm90/backward/config.cuh"

// Puts zeros in the place of what nobody may see. Products multiply it with zeros, but 0 · NaN is NaN. By all
// consumers.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardCleaner {
    static constexpr int kVectors = kPanelRowBytes / 16;

    BackwardMemory<Config> memory;
    int thread;  // among all consumers

    // Keys and values that no query sees.
    __device__ __forceinline__ void clean_keys(const KeyTileMessage& tile) const {
#pragma unroll 1
        for (int i = thread; i < Config::kKeys * kVectors; i += Config::kConsumerThreads) {
            const int key = i / kVectors;
            if (tile.seen[key / 32] >> key % 32 & 1)
                continue;
            clean<Config::kDim>(memory.k() + i * 16, Config::kKeys);
            clean<Config::kVDim>(memory.v() + i * 16, Config::kKeys);
        }
        finish();
    }

    // Queries without logits, and the cotangents of their output.
    __device__ __forceinline__ void clean_rows(unsigned step) const {
#pragma unroll 1
        for (int i = thread; i < Config::kRows * kVectors; i += Config::kConsumerThreads) {
            const int row = i / kVectors;
            if (memory.rows(step)[row / 8].lse_log2[row % 8] != INFINITY)
                continue;
            clean<Config::kDim>(memory.q(step) + i * 16, Config::kRows);
            clean<Config::kVDim>(memory.dout(step) + i * 16, Config::kRows);
        }
        finish();
    }

private:
    // 16 bytes in each panel.
    template <int kColumns> __device__ __forceinline__ static void clean(SharedAddress to, int rows) {
#pragma unroll
        for (int panel = 0; panel < panels(kColumns); ++panel)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + panel * rows * kPanelRowBytes), "r"(0)
                         : "memory");
    }

    __device__ __forceinline__ static void finish() {
        fence_shared_for_async();
        named_barrier_sync(kRowsCleaned, Config::kConsumerThreads);
    }
};

}  // namespace jaxmagi::sm90
