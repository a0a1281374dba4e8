#pragma once

#include <cuda.h>

#include "csrc/common/math.h"
#include "csrc/common/sm90/cluster.cuh"
#include "csrc/common/sm90/dependent_launch.cuh"
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
    // A reduce-scatter's tiles leave more slowly than a consumer hands them over, so it has a buffer for each panel of
    // a tile.
    static constexpr bool kBuffersWholeTile = kCollective == Collective::kReduceScatter;
    static constexpr int kDepth = kPanelColumns, kStages = kBuffersWholeTile ? 3 : 4;
    static constexpr int kConsumers = kTileRows / 64, kThreads = (kConsumers + 1) * kWarpgroupThreads;
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

    static constexpr int kXBytes = kTileRows * kPanelRowBytes, kWBytes = kTileColumns * kPanelRowBytes,
                         kStageBytes = kXBytes + kWBytes;
    static constexpr int kBuffers = kBuffersWholeTile ? kPanels : 2;  // of a consumer, for panels on their way
    static constexpr int kPanelBytes = 64 * kPanelRowBytes;           // of a consumer's rows
    static constexpr int kBarriers = kStages * kStageBytes + kConsumers * kBuffers * kPanelBytes;
    static constexpr int kClaims = 2;  // tiles that a cluster has claimed at most
    static constexpr int kPushBuffers = kStages * kStageBytes / kPieceBytes;
    static constexpr int kPushBarriers = kCollective == Collective::kAllGather ? kPushBuffers + 2 : 0;
    static constexpr int kNumBarriers = 2 * kStages + kConsumers * kBuffers + 2 * kClaims + kPushBarriers,
                         kClaimed = kBarriers + 8 * kNumBarriers;
    static constexpr int kAlignment = 1024, kBegun = kClaimed + 4 * kClaims,
                         kBytes = kAlignment + kBegun + 4;
    static_assert(kBytes <= 227 * 1024);
    static_assert(kPanels % kBuffers == 0);  // so that all buffers have as many panels of a tile
    static_assert(1 + kConsumers * (kBuffers + 2) <= 16, "there are 16 named barriers");
    static_assert(kCollective != Collective::kAllGather or kPushBuffers == 3);  // two pieces are loaded ahead of one
};

struct GemmTensorMaps {
    CUtensorMap x, gathered, w, y;  // gathered: rows of other ranks, of an all-gather
};

struct GemmArguments {
    ProductShape shape;
    int lag;  // of a reduce-scatter: rounds by which tiles of the rank itself are behind those of others (tiles.cuh)
    char* received;
    ReceivedLayout layout;
    collectives::ProductCounts* counts;
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

    // Return where the number of clusters that had begun before is, and the barrier that tells that it is there.
    __device__ __forceinline__ SharedAddress begun_before() const { return base + Config::kBegun; }
    __device__ __forceinline__ Mbarrier begun() const {
        return barrier(kClaimBarriers + 2 * Config::kClaims + Config::kPushBuffers + 1);
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

// Waits until the addresses of all ranks' memory are there and the words behind them are zero. Called by each thread
// that reads or writes one of them.
__device__ __forceinline__ void wait_for_addresses() {
    wait_for_prior_grids();
}

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

// Named barriers of a consumer and its mover. That of item 0 says that all buffers are free for the tile, that of a
// later item that the mover has read the panel whose place the item takes.
inline constexpr int kHandOverThreads = kWarpgroupThreads + 32;

template <typename Config> __device__ __forceinline__ int buffer_filled(int consumer, int item) {
    return 1 + Config::kBuffers * consumer + item % Config::kBuffers;
}
template <typename Config> __device__ __forceinline__ int buffer_free(int consumer, int item) {
    return 1 + Config::kBuffers * Config::kConsumers + 2 * consumer + item % 2;
}

}  // namespace jaxmagi::overlap
