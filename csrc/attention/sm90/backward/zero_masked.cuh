#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/consumer_thread.cuh"

// All consumers together write zeros over what is fully masked. Products multiply it with zeros, but 0 · NaN is NaN.

namespace jaxmagi::sm90 {

// Fills 16 bytes of a row in each panel with zeros.
template <int kColumns> __device__ __forceinline__ void zero_fill(SharedAddress to, int rows) {
#pragma unroll
    for (int panel = 0; panel < panels(kColumns); ++panel)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + panel * rows * kPanelRowBytes), "r"(0)
                     : "memory");
}

template <typename Config> struct ZeroMasked {
    static constexpr int kVectors = kPanelRowBytes / 16;

    BackwardMemory<Config> memory;
    ConsumerThread thread;

    // Zero-fills keys and values that no query sees.
    __device__ __forceinline__ void keys(const BackwardWorkItem& work) const {
#pragma unroll 1
        for (int i = first(); i < Config::kKeys * kVectors; i += Config::kConsumerThreads) {
            const int key = i / kVectors;
            if (work.visible[key / 32] >> key % 32 & 1)
                continue;
            zero_fill<Config::kDim>(memory.k() + i * 16, Config::kKeys);
            zero_fill<Config::kVDim>(memory.v() + i * 16, Config::kKeys);
        }
        finish();
    }

    // Zero-fills rows of Q and dO of a step that see no key.
    __device__ __forceinline__ void rows(unsigned step) const {
#pragma unroll 1
        for (int i = first(); i < Config::kRows * kVectors; i += Config::kConsumerThreads) {
            const int row = i / kVectors;
            if (memory.rows(step)[row / 8].lse_log2[row % 8] != INFINITY)
                continue;
            zero_fill<Config::kDim>(memory.q(step) + i * 16, Config::kRows);
            zero_fill<Config::kVDim>(memory.dout(step) + i * 16, Config::kRows);
        }
        finish();
    }

private:
    __device__ __forceinline__ int first() const {
        return static_cast<int>(thread.warpgroup * kWarpgroupThreads + thread.index());
    }
    __device__ __forceinline__ static void finish() {
        fence_shared_for_async();
        named_barrier_sync(kZeroFilled, Config::kConsumerThreads);
    }
};

// Returns true if the step has fully masked rows, after they were zero-filled.
template <typename Config>
__device__ __forceinline__ bool zero_masked_rows(BackwardMemory<Config> memory, ConsumerThread thread,
                                                 unsigned step) {
    const bool has_masked_rows = memory.rows(step)->block_has_masked_rows != 0;
    if (has_masked_rows)
        ZeroMasked<Config>{memory, thread}.rows(step);
    return has_masked_rows;
}

template <typename Config>
__device__ __forceinline__ void zero_masked_keys(BackwardMemory<Config> memory, ConsumerThread thread,
                                                 const BackwardWorkItem& work) {
    if (not work.all_visible)
        ZeroMasked<Config>{memory, thread}.keys(work);
}

}  // namespace jaxmagi::sm90
