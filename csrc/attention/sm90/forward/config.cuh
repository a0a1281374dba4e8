#pragma once

#include "csrc/attention/sm90/forward/arguments.cuh"
#include "csrc/attention/sm90/forward/work_item.cuh"
#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/panel.h"
#include "csrc/common/sm90/warpgroup.cuh"

// A forward kernel's compile-time sizes and its layout of shared memory.

namespace jaxmagi::sm90 {

// Shared memory of a CTA, and how much of it operands may fill: descriptors and barriers take the rest.
inline constexpr int kSharedBytes = 227 * 1024, kOperandBytes = 224 * 1024;

// Keys of one TMA load into a block with a packed tail.
inline constexpr int kPartKeys = 16;

// kDim, kVDim: what the matrix units work with; TMA fills up smaller head dimensions with zeros.
// kConsumers warpgroups have 64 query rows each. kKeys: keys of a block. kSoftCap: logits are capped.
template <typename Element_, int kDim_, int kVDim_, int kConsumers_, int kKeys_, bool kSoftCap_> struct ForwardConfig {
    using Element = Element_;
    static constexpr int kDim = kDim_, kVDim = kVDim_, kConsumers = kConsumers_, kKeys = kKeys_;
    static constexpr bool kSoftCap = kSoftCap_;
    static constexpr int kRows = 64 * kConsumers, kThreads = kWarpgroupThreads * (kConsumers + 1);

    // setmaxnreg divides the registers of the launch, 168 (2 consumers) or 128 (3) a thread, between the warpgroups. A
    // kernel that asks for more waits forever.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;  // also of the scheduler and the output store
    static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= kLaunchRegisters * (kConsumers + 1));
    // The warpgroups issue their products in turn (FlashAttention-3's scheduler barrier). The longest products do well
    // without.
    static constexpr bool kSchedulerBarrier = kVDim <= 192;

    static constexpr int kQBytes = kRows * kPanelRowBytes * panels(kDim);
    static constexpr int kKBytes = kKeys * kPanelRowBytes * panels(kDim);
    static constexpr int kVBytes = kKeys * kPanelRowBytes * panels(kVDim);
    // Blocks of keys and values in shared memory. Their number is a power of two: with three stages, finding the stage
    // of a block takes 3 % of the time.
    static constexpr int kStages = (kOperandBytes - kQBytes) / (kKBytes + kVBytes) >= 4 ? 4 : 2;

    // A 16-bit output goes through shared memory where there is room for it: the warpgroup is free earlier, which
    // counts since the other warpgroups end at the same time and leave the matrix units idle. Staging takes registers:
    // D 96 with two stages would spill.
    static constexpr int kOutBytes = 64 * kPanelRowBytes * panels(kVDim);
    static constexpr bool kStagesOut =
        kStages == 4 and kQBytes + kStages * (kKBytes + kVBytes) + kOutBytes <= kOperandBytes;
};

template <typename Config> struct ForwardMemory {
    // Every work item has at least one run. When the scheduler writes item t, the producer has released the run kRuns
    // before, which is of item t - kRuns or a later one. The consumers may still read the item before that one, for
    // their stores, and the output store the one before that: hence at least kRuns + 3 work items. Descriptors of a
    // block are read when its keys may already be replaced: hence twice as many as stages.
    static constexpr int kRuns = 4, kItems = kRuns + 4, kDescriptors = 2 * Config::kStages;
    static constexpr int kSingleBarriers = 4, kOutBarriers = kSingleBarriers + 2 * kRuns + 4 * Config::kStages;
    static constexpr int kQ = 0, kK = kQ + Config::kQBytes, kV = kK + Config::kStages * Config::kKBytes,
                         kOut = kV + Config::kStages * Config::kVBytes,
                         kWorkItems = kOut + (Config::kStagesOut ? Config::kOutBytes : 0),
                         kBandRuns = kWorkItems + kItems * static_cast<int>(sizeof(ForwardWorkItem)),
                         kBlocks = kBandRuns + kRuns * static_cast<int>(sizeof(ForwardBandRun)),
                         kPackedTails = kBlocks + kDescriptors * static_cast<int>(sizeof(BlockDescriptor)),
                         kBarriers = kPackedTails + kDescriptors * static_cast<int>(sizeof(BlockDescriptor)),
                         kNumZeroed = kBarriers + 8 * (kOutBarriers + Config::kConsumers), kWork = kNumZeroed + 8,
                         kEnd = kWork + static_cast<int>(sizeof(ForwardWork)),
                         kAlignment = 1024, kBase = kAlignment, kBytes = kEnd;
    // Dynamic shared memory begins at kBase, behind what the system reserves, as load_forward checks.
    static_assert(kBytes <= kSharedBytes);

    char* base;  // aligned

    // The scheduler has no register for the base, which is a constant for it.
    __device__ __forceinline__ ForwardMemory() : base(static_cast<char*>(__cvta_shared_to_generic(kBase))) {}
    // Consumers and the output store would spill for a constant, and the producer has 7 instructions more a block.
    __device__ __forceinline__ explicit ForwardMemory(char* raw)
        : base(raw + (-shared_address(raw) & (kAlignment - 1))) {
        if (shared_address(base) != kBase)
            __trap();
    }
    __device__ __forceinline__ SharedAddress q() const { return shared_address(base) + kQ; }
    __device__ __forceinline__ SharedAddress k(unsigned block) const {
        return shared_address(base) + kK + block % Config::kStages * Config::kKBytes;
    }
    __device__ __forceinline__ SharedAddress v(unsigned block) const {
        return shared_address(base) + kV + block % Config::kStages * Config::kVBytes;
    }
    // How many blocks of values the producer has padded with zeros. It has no register left for the count.
    __device__ __forceinline__ unsigned& num_zeroed() const { return *reinterpret_cast<unsigned*>(base + kNumZeroed); }
    // The output of one warpgroup, in panels.
    __device__ __forceinline__ SharedAddress out() const { return shared_address(base) + kOut; }
    // The tiles that the CTA computes now. Only the scheduler reads and changes it behind the kernel's first barrier.
    __device__ __forceinline__ ForwardWork& work() const { return *reinterpret_cast<ForwardWork*>(base + kWork); }
    __device__ __forceinline__ ForwardWorkItem& work_item(int item) const {
        return reinterpret_cast<ForwardWorkItem*>(base + kWorkItems)[static_cast<unsigned>(item) % kItems];
    }
    __device__ __forceinline__ ForwardBandRun& band_run(unsigned run) const {
        return reinterpret_cast<ForwardBandRun*>(base + kBandRuns)[run % kRuns];
    }
    __device__ __forceinline__ BlockDescriptor& descriptor(unsigned block) const {
        return reinterpret_cast<BlockDescriptor*>(base + kBlocks)[block % kDescriptors];
    }
    __device__ __forceinline__ BlockDescriptor& packed_tail(unsigned block) const {
        return reinterpret_cast<BlockDescriptor*>(base + kPackedTails)[block % kDescriptors];
    }
    // The table at the head of kernel.cuh says what each barrier protects.
    __device__ __forceinline__ Mbarrier q_full() const { return barrier(0); }
    __device__ __forceinline__ Mbarrier q_empty() const { return barrier(1); }
    __device__ __forceinline__ Mbarrier v_loaded() const { return barrier(2); }
    __device__ __forceinline__ Mbarrier out_full() const { return barrier(3); }
    __device__ __forceinline__ Mbarrier run_full(unsigned run) const { return barrier(kSingleBarriers + run % kRuns); }
    __device__ __forceinline__ Mbarrier run_empty(unsigned run) const {
        return barrier(kSingleBarriers + kRuns + run % kRuns);
    }
    __device__ __forceinline__ static int run_parity(unsigned run) { return run / kRuns & 1; }
    __device__ __forceinline__ Mbarrier out_empty(int warpgroup) const { return barrier(kOutBarriers + warpgroup); }
    __device__ __forceinline__ static int out_empty_parity(int item, int warpgroup) {
        return warpgroup == 0 ? (item & 1) ^ 1 : item & 1;
    }
    __device__ __forceinline__ static int out_full_parity(int item, int warpgroup) {
        return (item * Config::kConsumers + warpgroup) & 1;
    }
    __device__ __forceinline__ Mbarrier k_full(unsigned block) const { return stage_barrier(0, block); }
    __device__ __forceinline__ Mbarrier k_empty(unsigned block) const { return stage_barrier(1, block); }
    __device__ __forceinline__ Mbarrier v_full(unsigned block) const { return stage_barrier(2, block); }
    __device__ __forceinline__ Mbarrier v_empty(unsigned block) const { return stage_barrier(3, block); }
    // Parity of the number of times that the stage of the block was used before.
    __device__ __forceinline__ static int parity(unsigned block) { return block / Config::kStages & 1; }

    // Called by one thread.
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
        num_zeroed() = 0;
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
