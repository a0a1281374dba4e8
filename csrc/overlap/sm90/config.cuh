#pragma once

#include <cuda.h>

#include "csrc/common/math.h"
#include "csrc/common/sm90/cluster.cuh"
#include "csrc/common/sm90/element.cuh"
#include "csrc/common/sm90/panel.h"
#include "csrc/common/sm90/system_memory.cuh"
#include "csrc/common/sm90/warpgroup.cuh"
#include "csrc/overlap/products.h"

// Sizes, arguments and shared memory of the GEMM.

namespace jaxmagi::overlap {

using namespace sm90;

// Two CTAs of a cluster compute tiles below each other, which together are a pair.
inline constexpr int kTileRows = 128, kTileColumns = 256, kClusterCtas = 2, kPairRows = kClusterCtas * kTileRows,
                     kPanels = panels(kTileColumns);
inline constexpr int kPieceBytes = 64 * 1024;  // of rows on their way

template <Collective kCollective_, typename Element_, bool kTransposedW_> struct GemmConfig {
    using Element = Element_;
    static constexpr Collective kCollective = kCollective_;
    static constexpr bool kTransposedW = kTransposedW_;
    static constexpr int kDepth = kPanelColumns, kStages = 4;
    static constexpr int kConsumers = kTileRows / 64, kThreads = (kConsumers + 1) * kWarpgroupThreads;
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

    static constexpr int kXBytes = kTileRows * kPanelRowBytes, kWBytes = kTileColumns * kPanelRowBytes,
                         kStageBytes = kXBytes + kWBytes;
    static constexpr int kBuffers = 2;                         // of a consumer, for panels on their way
    static constexpr int kPanelBytes = 64 * kPanelRowBytes;    // of a consumer's rows
    static constexpr int kBarriers = kStages * kStageBytes + kConsumers * kBuffers * kPanelBytes;
    static constexpr int kClaims = 2;                          // tiles that a cluster has claimed at most
    static constexpr int kPushBuffers = kStages * kStageBytes / kPieceBytes;
    static constexpr int kPushBarriers = kCollective == Collective::kAllGather ? kPushBuffers + 1 : 0;
    static constexpr int kNumBarriers = 2 * kStages + kConsumers * kBuffers + 2 * kClaims + kPushBarriers,
                         kClaimed = kBarriers + 8 * kNumBarriers;
    static constexpr int kAlignment = 1024, kBytes = kAlignment + kClaimed + 4 * kClaims;
    static_assert(kBytes <= 227 * 1024 and kConsumers == 2 and kBuffers == 2);  // named barriers count on the latter
};

struct GemmTensorMaps {
    CUtensorMap x, gathered, w, y;  // gathered: rows of other ranks, of an all-gather
};

struct GemmArguments {
    ProductShape shape;
    int lag;  // of a reduce-scatter: rounds by which tiles of the rank itself are behind those of others (tiles.cuh)
    char* received;
    ReceivedLayout layout;
    uint64_t timeout_ns;
    const void* x;  // the own rows, which an all-gather pushes

    // Returns the memory of a rank in which it receives tiles.
    __device__ __forceinline__ char* received_by(int rank) const {
        return reinterpret_cast<char* const*>(received)[rank];
    }
};

template <typename Config> struct GemmMemory {
    SharedAddress base;

    // It is opaque, since ptxas would compute it anew in each step, with a special register that it waits for.
    __device__ __forceinline__ explicit GemmMemory(const void* raw)
        : base(opaque((shared_address(raw) + Config::kAlignment - 1) & ~(Config::kAlignment - 1u))) {}

    __device__ __forceinline__ SharedAddress x(int stage) const { return base + stage * Config::kStageBytes; }
    __device__ __forceinline__ SharedAddress w(int stage) const { return x(stage) + Config::kXBytes; }
    __device__ __forceinline__ SharedAddress buffer(int consumer, int item) const {
        return base + Config::kStages * Config::kStageBytes +
               (consumer * Config::kBuffers + item % Config::kBuffers) * Config::kPanelBytes;
    }

    __device__ __forceinline__ Mbarrier full(int stage) const { return barrier(2 * stage); }
    __device__ __forceinline__ Mbarrier empty(int stage) const { return barrier(2 * stage + 1); }
    __device__ __forceinline__ Mbarrier loaded(int consumer, int item) const {
        return barrier(2 * Config::kStages + consumer * Config::kBuffers + item % Config::kBuffers);
    }

    // Return where a claimed tile is, and the barriers that tell that it is there and that all have read it. The latter
    // counts in the cluster's first CTA.
    __device__ __forceinline__ SharedAddress claim(int index) const { return base + Config::kClaimed + 4 * index; }
    __device__ __forceinline__ Mbarrier claimed(int index) const {
        return barrier(kClaimBarriers + 2 * index);
    }
    __device__ __forceinline__ Mbarrier read(int index) const {
        return barrier(kClaimBarriers + 2 * index + 1);
    }

    // Return where a piece of rows is on its way, which is the memory of stages, and the barriers that tell that it is
    // there and that both CTAs of the cluster have pushed their pieces.
    __device__ __forceinline__ SharedAddress piece(int turn) const {
        return base + turn % Config::kPushBuffers * kPieceBytes;
    }
    __device__ __forceinline__ Mbarrier piece_loaded(int turn) const {
        return barrier(kClaimBarriers + 2 * Config::kClaims + turn % Config::kPushBuffers);
    }
    __device__ __forceinline__ Mbarrier pushed() const {
        return barrier(kClaimBarriers + 2 * Config::kClaims + Config::kPushBuffers);
    }

private:
    static constexpr int kClaimBarriers = 2 * Config::kStages + Config::kConsumers * Config::kBuffers;

    __device__ __forceinline__ Mbarrier barrier(int index) const { return {base + Config::kBarriers + 8 * index}; }
};

// A place in a ring, and the parity of its present use.
template <int kCount> struct RingPlace {
    int index = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++index == kCount) {
            index = 0;
            parity ^= 1;
        }
    }
};

// Waits until a flag has a value, or until the time limit. Then the call has failed, which another kernel reports: with
// a call of printf in the GEMM, ptxas would have products wait for each other.
__device__ __forceinline__ void wait_for_flag(const GemmArguments& arguments, const uint32_t* flag, uint32_t value,
                                              int rank) {
    uint32_t* const failure = reinterpret_cast<uint32_t*>(arguments.received + arguments.layout.failure);
    const uint64_t begin = nanoseconds();
    while (load_acquire(flag) < value and load_acquire(failure) == 0)
        if (nanoseconds() - begin >= arguments.timeout_ns)
            store_release(failure, 1 + rank);
}

// Named barriers of a consumer and its mover, for each buffer.
inline constexpr int kHandOverThreads = kWarpgroupThreads + 32;

__device__ __forceinline__ int buffer_filled(int consumer, int item) {
    return 1 + 2 * consumer + item % 2;
}
__device__ __forceinline__ int buffer_free(int consumer, int item) {
    return 5 + 2 * consumer + item % 2;
}

}  // namespace jaxmagi::overlap
