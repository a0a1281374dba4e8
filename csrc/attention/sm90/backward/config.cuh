#pragma once

#include "csrc/attention/sm90/backward/row_statistics.h"
#include "csrc/attention/sm90/backward/schedule.cuh"
#include "csrc/attention/sm90/backward/sums_layout.h"
#include "csrc/attention/sm90/backward/work_item.cuh"
#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/panel.h"
#include "csrc/common/sm90/warpgroup.cuh"

// A backward kernel's compile-time sizes and its layout of shared memory.

namespace jaxmagi::sm90 {

// kDim, kVDim: what the matrix units work with; TMA fills up smaller head dimensions with zeros.
// kRows: queries of a block. kKeys: keys of a tile. kQStages, kDoutStages: blocks of queries and of dO (cotangents of
// the output) in shared memory. kSoftCap: logits are capped.
template <typename Element_, int kDim_, int kVDim_, int kRows_, int kKeys_, int kConsumers_, int kQStages_,
          int kDoutStages_, bool kSoftCap_>
struct BackwardConfig {
    using Element = Element_;
    using RoundedLogits = uint32_t[kRows_ / 16][4];  // of a warpgroup of a narrow kernel, an operand of wgmma
    static constexpr int kDim = kDim_, kVDim = kVDim_, kRows = kRows_, kKeys = kKeys_, kConsumers = kConsumers_;
    static constexpr int kQStages = kQStages_, kDoutStages = kDoutStages_;
    static constexpr bool kSoftCap = kSoftCap_;
    // Wide kernels divide the head dimension of dK and dV between the warpgroups; the others divide the keys.
    static constexpr bool kWide = kDim > 128;
    static constexpr bool kCanAddGradients = can_add_gradients(kDim);
    static constexpr int kRowBlock = query_sums_layout(kRows).row_block;
    static_assert(kRows % kRowBlock == 0);
    static constexpr bool kTransposedDq = query_sums_layout(kRows).transposed;
    static_assert(not kTransposedDq or kDim == 128);
    // The sums of dQ of a head lie panel by panel.
    static constexpr int kSumPanels = query_sums_layout(kRows).panels(kDim), kSumColumns = kDim / kSumPanels;
    static constexpr int kThreads = kWarpgroupThreads * (kConsumers + 1);
    static constexpr int kConsumerThreads = kWarpgroupThreads * kConsumers;

    // setmaxnreg divides the registers of the launch, 168 (2 consumers) or 128 (3) a thread, between the warpgroups.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
    static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= kLaunchRegisters * (kConsumers + 1));

    static constexpr int kQBytes = kRows * kPanelRowBytes * panels(kDim);
    static constexpr int kDoutBytes = kRows * kPanelRowBytes * panels(kVDim);
    static constexpr int kKBytes = kKeys * kPanelRowBytes * panels(kDim);
    static constexpr int kVBytes = kKeys * kPanelRowBytes * panels(kVDim);
    static constexpr int kRowsBytes = kRows / 8 * static_cast<int>(sizeof(EightRows));
    // A 16-bit P or dS of a step, queries by keys. There are two: two of dS, or in wide kernels P and dS.
    static constexpr int kLogitsBytes = kRows * kPanelRowBytes * panels(kKeys), kLogitsPlaces = 2;
    // The reducer adds to sums in global memory from a part of shared memory for each warpgroup: 64 columns of a row
    // block of dQ, which are contiguous in global memory, or 64 times 64 numbers of dK or dV. Wide kernels store dQ in
    // several passes.
    static constexpr int kPartBytes = kRowBlock * 64 * 4, kDqPasses = kWide ? panels(kDim) / kConsumers : 1;
    static constexpr int kPartsBytes = kConsumers * kPartBytes, kSumBytes = kRows * kDim * 4;
};

template <typename Config> struct BackwardMemory {
    // Every work item has a run. When the scheduler writes work item t, the producer has released the run kRuns before
    // the first run of t, which belongs to item t - kRuns or a later one. Its keys were loaded after the last product
    // of item t - kRuns - 1, and so after all consumers had stored the gradients of the item before that.
    static constexpr int kRuns = Config::kConsumers == 2 ? 4 : 2, kWorkItems = kRuns + 2;
    // The producer describes step s after the consumers released the queries of step c = s - kQStages - 1. Then dQ of
    // step c - 1 is stored: in wide kernels by all warpgroups, in narrow ones by warpgroup 0, which stores it before it
    // passes the turn on in which warpgroup 1 releases the queries. So the reducer has read dQ of step c - 2. Of two
    // warps, which pass their turns on before they are done, only step c - 4 is done.
    static constexpr int kSteps = Config::kQStages + 5;
    static constexpr int kDsPlaces = Config::kWide ? 0 : Config::kLogitsPlaces;  // places for dS that have barriers
    static constexpr int kSingleBarriers = 2;
    static constexpr int kK = 0, kV = kK + Config::kKBytes, kQ = kV + Config::kVBytes,
                         kDout = kQ + Config::kQStages * Config::kQBytes,
                         kLogits = kDout + Config::kDoutStages * Config::kDoutBytes,
                         kParts = kLogits + Config::kLogitsPlaces * Config::kLogitsBytes,
                         kRows = kParts + Config::kPartsBytes,
                         kDescriptors = kRows + Config::kQStages * Config::kRowsBytes,
                         kItems = kDescriptors + kSteps * static_cast<int>(sizeof(StepDescriptor)),
                         kBandRuns = kItems + kWorkItems * static_cast<int>(sizeof(BackwardWorkItem)),
                         kCurrentTile = kBandRuns + kRuns * static_cast<int>(sizeof(BackwardBandRun)),
                         kSchedule = kCurrentTile + static_cast<int>(sizeof(CurrentTile)),
                         kBarriers = kSchedule + static_cast<int>(sizeof(BackwardSchedule)),
                         kStageBarriers = kSingleBarriers + 2 * kRuns,
                         kStepBarriers = kStageBarriers + 2 * Config::kQStages + 2 * Config::kDoutStages,
                         kDsBarriers = kStepBarriers + kSteps,
                         kEnd = kBarriers + 8 * (kDsBarriers + 2 * kDsPlaces), kMostBytes = 227 * 1024,
                         kAlignment = 1024, kBase = 1024;
    // Dynamic shared memory begins at kBase, behind what the system reserves, as load_backward checks; if it were
    // declared to be aligned, ptxas would spill.
    static constexpr int kBytes = kEnd;
    static_assert(kBytes <= kMostBytes and kBase % kAlignment == 0);

    char* base;  // aligned

    // The base is a constant: from `raw`, ptxas computes addresses anew between the products of a step, with a special
    // register that holds them up, 160 clocks a step at D 128 and 310 at D 64. For consumers with a soft cap, which are
    // slower anyway, ptxas spills for the constant and for `raw` alike, but not for the latter aligned, which adds
    // nothing to it.
    __device__ __forceinline__ BackwardMemory(char* raw, bool is_consumer)
        : base(Config::kSoftCap and is_consumer ? raw + (-shared_address(raw) & (kAlignment - 1))
                                                : static_cast<char*>(__cvta_shared_to_generic(kBase))) {
        if (not Config::kSoftCap and shared_address(raw) != kBase)
            __trap();
    }
    // Addresses that are the same in every step are opaque: ptxas would keep all wgmma descriptors in registers.
    __device__ __forceinline__ SharedAddress k() const { return opaque(shared_address(base) + kK); }
    __device__ __forceinline__ SharedAddress v() const { return opaque(shared_address(base) + kV); }
    __device__ __forceinline__ SharedAddress q(unsigned step) const {
        return shared_address(base) + kQ + step % Config::kQStages * Config::kQBytes;
    }
    __device__ __forceinline__ SharedAddress dout(unsigned step) const {
        return shared_address(base) + kDout + step % Config::kDoutStages * Config::kDoutBytes;
    }
    // P as queries by keys, only in wide kernels; the others have it in registers.
    __device__ __forceinline__ SharedAddress p() const { return opaque(shared_address(base) + kLogits); }
    // dS as queries by keys. Wide kernels have one place for it, the others two.
    __device__ __forceinline__ SharedAddress ds(unsigned step) const {
        const unsigned place = Config::kWide ? 1 : step % Config::kLogitsPlaces;
        return opaque(shared_address(base) + kLogits + place * Config::kLogitsBytes);
    }
    __device__ __forceinline__ SharedAddress part(int warpgroup) const {
        return opaque(shared_address(base) + kParts) + warpgroup * Config::kPartBytes;
    }
    // Statistics of the rows of a step, loaded with its queries.
    __device__ __forceinline__ const EightRows* rows(unsigned step) const {
        return reinterpret_cast<const EightRows*>(base + kRows + step % Config::kQStages * Config::kRowsBytes);
    }
    __device__ __forceinline__ StepDescriptor& descriptor(unsigned step) const {
        return reinterpret_cast<StepDescriptor*>(base + kDescriptors)[step % kSteps];
    }
    __device__ __forceinline__ BackwardWorkItem& work_item(int item) const {
        return reinterpret_cast<BackwardWorkItem*>(base + kItems)[static_cast<unsigned>(item) % kWorkItems];
    }
    __device__ __forceinline__ BackwardBandRun& band_run(unsigned run) const {
        return reinterpret_cast<BackwardBandRun*>(base + kBandRuns)[run % kRuns];
    }
    __device__ __forceinline__ CurrentTile& current_tile() const {
        return *reinterpret_cast<CurrentTile*>(base + kCurrentTile);
    }
    __device__ __forceinline__ BackwardSchedule& schedule() const {
        return *reinterpret_cast<BackwardSchedule*>(base + kSchedule);
    }
    __device__ __forceinline__ Mbarrier kv_full() const { return barrier(0); }
    __device__ __forceinline__ Mbarrier kv_empty() const { return barrier(1); }
    __device__ __forceinline__ Mbarrier run_full(unsigned run) const { return barrier(kSingleBarriers + run % kRuns); }
    __device__ __forceinline__ Mbarrier run_empty(unsigned run) const {
        return barrier(kSingleBarriers + kRuns + run % kRuns);
    }
    __device__ __forceinline__ static int run_parity(unsigned run) { return run / kRuns & 1; }
    __device__ __forceinline__ Mbarrier q_full(unsigned step) const {
        return barrier(kStageBarriers + step % Config::kQStages);
    }
    __device__ __forceinline__ Mbarrier q_empty(unsigned step) const {
        return barrier(kStageBarriers + Config::kQStages + step % Config::kQStages);
    }
    __device__ __forceinline__ Mbarrier dout_full(unsigned step) const {
        return barrier(kStageBarriers + 2 * Config::kQStages + step % Config::kDoutStages);
    }
    __device__ __forceinline__ Mbarrier dout_empty(unsigned step) const {
        return barrier(kStageBarriers + 2 * Config::kQStages + Config::kDoutStages + step % Config::kDoutStages);
    }
    // The descriptor of the step is there.
    __device__ __forceinline__ Mbarrier described(unsigned step) const {
        return barrier(kStepBarriers + step % kSteps);
    }
    // In narrow kernels: dS of all keys of the tile is stored; the product for dQ has read it.
    __device__ __forceinline__ Mbarrier ds_full(unsigned step) const {
        return barrier(kDsBarriers + step % Config::kLogitsPlaces);
    }
    __device__ __forceinline__ Mbarrier ds_empty(unsigned step) const {
        return barrier(kDsBarriers + kDsPlaces + step % Config::kLogitsPlaces);
    }
    __device__ __forceinline__ static int ds_parity(unsigned step) { return step / Config::kLogitsPlaces & 1; }
    __device__ __forceinline__ static int step_parity(unsigned step) { return step / kSteps & 1; }
    // Parity of the number of times that the stage of the step was used before.
    __device__ __forceinline__ static int q_parity(unsigned step) { return step / Config::kQStages & 1; }
    __device__ __forceinline__ static int dout_parity(unsigned step) { return step / Config::kDoutStages & 1; }

    // Called by one thread.
    __device__ __forceinline__ void init_barriers() const {
        kv_full().init(1);
        kv_empty().init(Config::kConsumerThreads / 32);
        for (int run = 0; run < kRuns; ++run) {
            run_full(run).init(1);
            run_empty(run).init(1);
        }
        for (int stage = 0; stage < Config::kQStages; ++stage) {
            q_full(stage).init(1);
            q_empty(stage).init(Config::kConsumers);
        }
        for (int stage = 0; stage < Config::kDoutStages; ++stage) {
            dout_full(stage).init(1);
            dout_empty(stage).init(Config::kConsumers);
        }
        for (int step = 0; step < kSteps; ++step)
            described(step).init(1);
        for (int place = 0; place < kDsPlaces; ++place) {
            ds_full(place).init(Config::kConsumerThreads / 32);
            ds_empty(place).init(Config::kConsumers);
        }
        fence_mbarrier_init();
    }

private:
    __device__ __forceinline__ Mbarrier barrier(int index) const {
        return {shared_address(base) + kBarriers + 8 * index};
    }
};

// Named barriers. kPartEmpty + i and kPartFull + i are those of consumer warpgroup i and a reducer warp, kReducerTurn +
// i that of reducer warp i and the other one, kRowsZeroFilled + i that of consumer warpgroup i alone. Narrow kernels
// have kTensorTurn + i, of consumer warpgroup i and the other one, and wide ones kLogitsStored and kLogitsRead.
enum BackwardBarrier {
    kLogitsStored = 1,
    kLogitsRead = 2,
    kTensorTurn = 1,
    kZeroFilled = 3,
    kPartEmpty = 4,
    kPartFull = 7,
    kReducerTurn = 10,
    kRowsZeroFilled = 12
};
inline constexpr int kPartThreads = kWarpgroupThreads + 32, kTurnThreads = 64;

}  // namespace jaxmagi::sm90
