#pragma once

#include "csrc/attention/sm90/forward/work_item.cuh"
#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/panel.h"
#include "csrc/common/sm90/warpgroup.cuh"

// What a forward kernel is made of: sizes known at compile time and the layout of shared memory.

namespace jaxmagi::sm90 {

// What a CTA has of shared memory, and how much of it operands may fill: messages and barriers take the rest.
inline constexpr int kSharedBytes = 227 * 1024, kOperandBytes = 224 * 1024;

// Keys that are loaded at once where a block holds those of two runs.
inline constexpr int kPartKeys = 16;

// kDim, kVDim: what the matrix units work with; smaller head dimensions are filled up with zeros by TMA.
// kConsumers warpgroups own 64 query rows each. kKeys: of a block. kSoftCap: whether logits are capped.
template <typename Element_, int kDim_, int kVDim_, int kConsumers_, int kKeys_, bool kSoftCap_> struct ForwardConfig {
    using Element = Element_;
    static constexpr int kDim = kDim_, kVDim = kVDim_, kConsumers = kConsumers_, kKeys = kKeys_;
    static constexpr bool kSoftCap = kSoftCap_;
    static constexpr int kRows = 64 * kConsumers, kThreads = kWarpgroupThreads * (kConsumers + 1);

    // What setmaxnreg divides: registers of a thread at launch, 168 (2 consumers) or 128 (3), times warpgroups. To ask
    // for more is to wait forever.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
    // Of the producer's warpgroup, and so of the scheduler too.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
    static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= kLaunchRegisters * (kConsumers + 1));
    // Whether the warpgroups take turns at issuing products; with the longest products they do well without.
    static constexpr bool kTurns = kVDim <= 192;

    static constexpr int kQBytes = kRows * kPanelRowBytes * panels(kDim);
    static constexpr int kKBytes = kKeys * kPanelRowBytes * panels(kDim);
    static constexpr int kVBytes = kKeys * kPanelRowBytes * panels(kVDim);
    // Blocks of keys and values in shared memory: a power of two, since with three it takes 3 % of the time to find the
    // place of a block.
    static constexpr int kStages = (kOperandBytes - kQBytes) / (kKBytes + kVBytes) >= 4 ? 4 : 2;

    // The output of a warpgroup, if of 16 bits, goes through shared memory where there is room for it: the warpgroup is
    // done with it sooner, which counts, since the others are at their ends too, and nobody multiplies. It takes
    // registers: with D 96 and two stages they spill.
    static constexpr int kOutBytes = 64 * kPanelRowBytes * panels(kVDim);
    static constexpr bool kStagesOut =
        kStages == 4 and kQBytes + kStages * (kKBytes + kVBytes) + kOutBytes <= kOperandBytes;
};

template <typename Config> struct ForwardMemory {
    // Every tile has a run. When the scheduler writes the message of tile t, the run kRuns before is given back, and
    // with it tile t - kRuns or a later one. The consumers may still read the message of the tile before that one, for
    // its stores, and the sender that of one more: hence at least kRuns + 3 messages of tiles. A block's messages are
    // read when its keys may already be replaced, hence the longer rings.
    static constexpr int kRuns = 4, kTileMessages = kRuns + 4, kBlockMessages = 2 * Config::kStages;
    static constexpr int kSingleBarriers = 4, kOutBarriers = kSingleBarriers + 2 * kRuns + 4 * Config::kStages;
    static constexpr int kQ = 0, kK = kQ + Config::kQBytes, kV = kK + Config::kStages * Config::kKBytes,
                         kOut = kV + Config::kStages * Config::kVBytes,
                         kTiles = kOut + (Config::kStagesOut ? Config::kOutBytes : 0),
                         kRunMessages = kTiles + kTileMessages * static_cast<int>(sizeof(TileMessage)),
                         kBlocks = kRunMessages + kRuns * static_cast<int>(sizeof(RunMessage)),
                         kGuests = kBlocks + kBlockMessages * static_cast<int>(sizeof(BlockMessage)),
                         kBarriers = kGuests + kBlockMessages * static_cast<int>(sizeof(BlockMessage)),
                         kCleaned = kBarriers + 8 * (kOutBarriers + Config::kConsumers), kEnd = kCleaned + 8,
                         kAlignment = 1024,
                         kBytes = kEnd + kAlignment;
    static_assert(kBytes <= kSharedBytes);

    char* base;  // aligned

    __device__ __forceinline__ explicit ForwardMemory(char* raw)
        : base(raw + (-shared_address(raw) & (kAlignment - 1))) {}
    __device__ __forceinline__ SharedAddress q() const { return shared_address(base) + kQ; }
    __device__ __forceinline__ SharedAddress k(unsigned block) const {
        return shared_address(base) + kK + block % Config::kStages * Config::kKBytes;
    }
    __device__ __forceinline__ SharedAddress v(unsigned block) const {
        return shared_address(base) + kV + block % Config::kStages * Config::kVBytes;
    }
    // Of blocks whose values the producer cleaned, which has no register left to count them in.
    __device__ __forceinline__ unsigned& num_cleaned() const { return *reinterpret_cast<unsigned*>(base + kCleaned); }
    // Of one warpgroup, in panels.
    __device__ __forceinline__ SharedAddress out() const { return shared_address(base) + kOut; }
    __device__ __forceinline__ TileMessage& tile_message(int turn) const {
        return reinterpret_cast<TileMessage*>(base + kTiles)[static_cast<unsigned>(turn) % kTileMessages];
    }
    __device__ __forceinline__ RunMessage& run_message(unsigned run) const {
        return reinterpret_cast<RunMessage*>(base + kRunMessages)[run % kRuns];
    }
    __device__ __forceinline__ BlockMessage& block_message(unsigned block) const {
        return reinterpret_cast<BlockMessage*>(base + kBlocks)[block % kBlockMessages];
    }
    __device__ __forceinline__ BlockMessage& guest_message(unsigned block) const {
        return reinterpret_cast<BlockMessage*>(base + kGuests)[block % kBlockMessages];
    }
    // Barriers of the queries, of values that wait for cleaning, and of the output on its way.
    __device__ __forceinline__ Mbarrier q_full() const { return barrier(0); }
    __device__ __forceinline__ Mbarrier q_empty() const { return barrier(1); }
    __device__ __forceinline__ Mbarrier v_loaded() const { return barrier(2); }
    __device__ __forceinline__ Mbarrier out_full() const { return barrier(3); }
    __device__ __forceinline__ Mbarrier run_full(unsigned run) const { return barrier(kSingleBarriers + run % kRuns); }
    __device__ __forceinline__ Mbarrier run_empty(unsigned run) const {
        return barrier(kSingleBarriers + kRuns + run % kRuns);
    }
    __device__ __forceinline__ static int run_parity(unsigned run) { return run / kRuns & 1; }
    // Of a warpgroup, which has the place of the output after the one before it, the first one after the last.
    __device__ __forceinline__ Mbarrier out_empty(int warpgroup) const { return barrier(kOutBarriers + warpgroup); }
    __device__ __forceinline__ static int out_empty_parity(int turn, int warpgroup) {
        return warpgroup == 0 ? (turn & 1) ^ 1 : turn & 1;
    }
    __device__ __forceinline__ static int out_full_parity(int turn, int warpgroup) {
        return (turn * Config::kConsumers + warpgroup) & 1;
    }
    // Of the stage that a block goes through.
    __device__ __forceinline__ Mbarrier k_full(unsigned block) const { return stage_barrier(0, block); }
    __device__ __forceinline__ Mbarrier k_empty(unsigned block) const { return stage_barrier(1, block); }
    __device__ __forceinline__ Mbarrier v_full(unsigned block) const { return stage_barrier(2, block); }
    __device__ __forceinline__ Mbarrier v_empty(unsigned block) const { return stage_barrier(3, block); }
    // How often the stage was used before, for the parity to wait for.
    __device__ __forceinline__ static int parity(unsigned block) { return block / Config::kStages & 1; }

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        q_full().init(1);
        q_empty().init(Config::kConsumers * kWarpgroupThreads / 32);
        v_loaded().init(1);
        out_full().init(kWarpgroupThreads / 32);
        for (int warpgroup = 0; warpgroup < Config::kConsumers; ++warpgroup)
            out_empty(warpgroup).init(1);
        for (int run = 0; run < kRuns; ++run) {
            run_full(run).init(1);
            run_empty(run).init(1);
        }
        for (int stage = 0; stage < Config::kStages; ++stage) {
            k_full(stage).init(1);
            v_full(stage).init(1);
            k_empty(stage).init(Config::kConsumers);
            v_empty(stage).init(Config::kConsumers);
        }
        fence_mbarrier_init();
        num_cleaned() = 0;
    }

private:
    __device__ __forceinline__ Mbarrier barrier(int index) const {
        return {shared_address(base) + kBarriers + 8 * index};
    }
    __device__ __forceinline__ Mbarrier stage_barrier(int kind, unsigned block) const {
        return barrier(kSingleBarriers + 2 * kRuns + kind * Config::kStages + block % Config::kStages);
    }
};

}  // namespace jaxmagi::sm90
