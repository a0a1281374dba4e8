#pragma once

#include "csrc/common/macros.h"
#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/warpgroup.cuh"

// What a forward kernel is made of: sizes known at compile time and the layout of shared memory.

namespace jaxmagi::sm90 {

inline constexpr int kPanelColumns = 64, kPanelRowBytes = 128;

JAXMAGI_HOST_DEVICE constexpr int panels(int dim) {
    return (dim + kPanelColumns - 1) / kPanelColumns;
}

// kDim, kVDim: what the matrix units work with; smaller head dimensions are filled up with zeros by TMA.
// kWideKeys, kNarrowKeys: keys of a block. Wide blocks are faster, narrow ones leave less over at the ends of short bands;
// the producer chooses for every tile.
// kConsumers warpgroups own 64 query rows each. kSoftCap: whether logits are capped.
template <typename Element_, int kDim_, int kVDim_, int kWideKeys_, int kNarrowKeys_, int kConsumers_, bool kSoftCap_>
struct ForwardConfig {
    using Element = Element_;
    static constexpr int kDim = kDim_, kVDim = kVDim_, kWideKeys = kWideKeys_, kNarrowKeys = kNarrowKeys_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr bool kSoftCap = kSoftCap_, kTwoWidths = kWideKeys != kNarrowKeys;
    static constexpr int kRows = 64 * kConsumers, kThreads = kWarpgroupThreads * (kConsumers + 1), kStages = 2;

    // setmaxnreg: kThreads * 168 (2 consumers) or 128 (3) registers at launch.
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
    // Where the output is large it is scaled while the tensor cores multiply queries and keys of the next block, else
    // right after the exponentials.
    static constexpr bool kRescaleEarly = kVDim > 128;
    // Whether the warpgroups take turns at issuing products; with the longest products they do well without.
    static constexpr bool kTurns = kVDim <= 192;

    static constexpr int kQBytes = kRows * kPanelRowBytes * panels(kDim);
    static constexpr int kKBytes = kWideKeys * kPanelRowBytes * panels(kDim);
    static constexpr int kVBytes = kWideKeys * kPanelRowBytes * panels(kVDim);
};

// One row tile of a head, for the consumers.
struct alignas(16) TileMessage {
    int num_blocks;  // -1: no more tiles
    int row, head, example;
    bool wide;  // blocks
};

// How the logits of one block of keys are masked. A row r of the tile sees columns
// [max(0, r + lower), min(num_columns, r + upper)) if row_begin <= r < row_end, and no column otherwise.
struct alignas(16) BlockMessage {
    int row_begin, row_end, lower, upper;
    int num_columns, masked;
};

enum ForwardBarrier { kQFull, kQEmpty, kKFull, kKEmpty = kKFull + 2, kVFull = kKEmpty + 2, kVEmpty = kVFull + 2,
                      kVLoaded = kVEmpty + 2, kNumForwardBarriers };

template <typename Config> struct ForwardMemory {
    // A message is read until the next but one block is masked, so that the ring is longer than that of the keys.
    static constexpr int kTileMessages = 2, kBlockMessages = 4;
    static constexpr int kQ = 0, kK = kQ + Config::kQBytes, kV = kK + Config::kStages * Config::kKBytes,
                         kTiles = kV + Config::kStages * Config::kVBytes,
                         kBlocks = kTiles + kTileMessages * static_cast<int>(sizeof(TileMessage)),
                         kBarriers = kBlocks + kBlockMessages * static_cast<int>(sizeof(BlockMessage)),
                         kEnd = kBarriers + 8 * kNumForwardBarriers, kAlignment = 1024, kBytes = kEnd + kAlignment;

    char* base;  // aligned

    __device__ __forceinline__ static ForwardMemory at(char* raw) {
        return {raw + (-shared_address(raw) & (kAlignment - 1))};
    }
    __device__ __forceinline__ SharedAddress q() const { return shared_address(base) + kQ; }
    __device__ __forceinline__ SharedAddress k(int stage) const {
        return shared_address(base) + kK + stage * Config::kKBytes;
    }
    __device__ __forceinline__ SharedAddress v(int stage) const {
        return shared_address(base) + kV + stage * Config::kVBytes;
    }
    __device__ __forceinline__ TileMessage& tile_message(int turn) const {
        return reinterpret_cast<TileMessage*>(base + kTiles)[turn % kTileMessages];
    }
    __device__ __forceinline__ BlockMessage& block_message(int block) const {
        return reinterpret_cast<BlockMessage*>(base + kBlocks)[block % kBlockMessages];
    }
    __device__ __forceinline__ Mbarrier barrier(int index) const {
        return {shared_address(base) + kBarriers + 8 * index};
    }
};

}  // namespace jaxmagi::sm90
