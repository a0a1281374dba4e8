#pragma once

#include "csrc/attention/sm90/backward/row_statistics.h"
#include "csrc/attention/sm90/tile_schedule.h"
#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/panel.h"
#include "csrc/common/sm90/warpgroup.cuh"
#include "csrc/mask/band.h"

// What a backward kernel is made of: sizes known at compile time and the layout of shared memory.

namespace jaxmagi::sm90 {

// kDim, kVDim: what the matrix units work with; smaller head dimensions are filled up with zeros by TMA.
// kRows: queries of a block. kKeys: keys of a tile. kQStages, kDoutStages: blocks of queries, and of cotangents of the
// output, in shared memory. kSoftCap: whether logits are capped.
template <typename Element_, int kDim_, int kVDim_, int kRows_, int kKeys_, int kConsumers_, int kQStages_,
          int kDoutStages_, bool kSoftCap_>
struct BackwardConfig {
    using Element = Element_;
    static constexpr int kDim = kDim_, kVDim = kVDim_, kRows = kRows_, kKeys = kKeys_, kConsumers = kConsumers_;
    static constexpr int kQStages = kQStages_, kDoutStages = kDoutStages_;
    static constexpr bool kSoftCap = kSoftCap_;
    // Above 128, warpgroups share the keys of a tile and divide the head dimension.
    static constexpr bool kWide = kDim > 128;
    static constexpr int kRowBlock = row_block_of(kRows);
    static_assert(kRows % kRowBlock == 0);
    static constexpr bool kTransposedDq = has_transposed_sums(kRowBlock);
    static_assert(not kTransposedDq or kDim == 128);
    // Whether dK of a step is summed up beside the softmax of the next, for which queries and their operand stay
    // longer.
    static constexpr bool kLateDk = not kWide and kRows == 64 and not kSoftCap;
    static constexpr int kThreads = kWarpgroupThreads * (kConsumers + 1);
    static constexpr int kConsumerThreads = kWarpgroupThreads * kConsumers;

    // What setmaxnreg divides: registers of a thread at launch, 168 (2 consumers) or 128 (3), times warpgroups.
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
    static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= kLaunchRegisters * (kConsumers + 1));

    static constexpr int kQBytes = kRows * kPanelRowBytes * panels(kDim);
    static constexpr int kDoutBytes = kRows * kPanelRowBytes * panels(kVDim);
    static constexpr int kKBytes = kKeys * kPanelRowBytes * panels(kDim);
    static constexpr int kVBytes = kKeys * kPanelRowBytes * panels(kVDim);
    static constexpr int kRowsBytes = kRows / 8 * static_cast<int>(sizeof(EightRows));
    // Of 16-bit numbers for each query and key of a step. Two of them.
    static constexpr int kLogitsBytes = kRows * kPanelRowBytes * panels(kKeys);
    // The gradient of a block of queries in shared memory: of each warpgroup a part, 64 columns of a row block, which
    // lie one after the other in global memory. Wide kernels do it in several passes.
    static constexpr int kDqPartBytes = kRowBlock * 64 * 4, kDqPasses = kWide ? panels(kDim) / kConsumers : 1;
    static constexpr int kDqBytes = kConsumers * kDqPartBytes, kSumBytes = kRows * kDim * 4;
};

// The tile that the scheduler works on: it has few registers.
struct alignas(16) KeyTile {
    int turn, key;  // how many tiles came before; the first key
    int first_band, end_band, mask, key_head, example;
    const ScheduledBand* bands;  // of the plan
    bool is_new;  // no run was sent yet
};

// The blocks of queries that see keys of a tile in one band, for the producer.
struct alignas(16) QueryRun {
    int key_begin, key_end;      // those of the band, counted from the tile's first key
    int lower, upper;            // queries [lower, upper) see the first key, [lower + 1, upper + 1) the next one
    int first_query, end_query;  // of the band
    Range blocks, whole;         // all; those in which every query sees every key
    int band, first_head;
    int turn, key, key_head, example, mask;  // of the tile
    bool first;                              // of the tile
    int origin;  // query at which block 0 begins, one of the first kRows. Stands here, or ptxas would spill
};

// One tile of keys, for the consumers.
struct alignas(16) KeyTileMessage {
    uint32_t seen[4];  // a bit for each key: whether any query sees it. Keys that do not exist count as seen
    int num_steps;     // blocks of queries of all heads of the group; 0: nobody sees the keys; -1: no more tiles
    int key, key_head, example;  // the first key
    bool all_seen;
};

// One block of queries of one head. Key r of the tile is seen by columns (queries) [max(first_column, r + lower),
// min(end_column, r + upper)) if key_begin <= r < key_end, and by none otherwise; where not masked, all see all.
struct alignas(16) StepMessage {
    int key_begin, key_end, lower, upper;  // read together
    int first_column, end_column;          // read together
    int masked;
    int row;  // the first one, among those of all heads: sums of 2^31 rows would take 512 GiB or more
    int mask, block, band, tile;           // fix the order of sums: block of queries in its head, band in the plan
};

template <typename Config> struct BackwardMemory {
    // Every tile has a run. When the scheduler writes the message of tile t, the run kRuns before its first is done
    // with: that of tile t - kRuns or a later one, whose keys could only be loaded when tile t - kRuns - 1 had no
    // products left, and all consumers had stored the gradients of the tile before that.
    static constexpr int kRuns = Config::kConsumers == 2 ? 4 : 2, kTileMessages = kRuns + 2;
    // Step s is described when queries of step s - kQStages - 1 were given back. All consumers had then handed over
    // dQ of the step before that one, for which the reducer had to be done with the step before that.
    static constexpr int kSteps = Config::kQStages + 4;
    static constexpr int kSingleBarriers = 2;
    static constexpr int kK = 0, kV = kK + Config::kKBytes, kQ = kV + Config::kVBytes,
                         kDout = kQ + Config::kQStages * Config::kQBytes,
                         kLogits = kDout + Config::kDoutStages * Config::kDoutBytes,
                         kDq = kLogits + 2 * Config::kLogitsBytes, kRows = kDq + Config::kDqBytes,
                         kStepMessages = kRows + Config::kQStages * Config::kRowsBytes,
                         kTiles = kStepMessages + kSteps * static_cast<int>(sizeof(StepMessage)),
                         kRunMessages = kTiles + kTileMessages * static_cast<int>(sizeof(KeyTileMessage)),
                         kTileInWork = kRunMessages + kRuns * static_cast<int>(sizeof(QueryRun)),
                         kBarriers = kTileInWork + static_cast<int>(sizeof(KeyTile)),
                         kStageBarriers = kSingleBarriers + 2 * kRuns,
                         kDone = kBarriers + 8 * (kStageBarriers + 2 * Config::kQStages + 2 * Config::kDoutStages),
                         kEnd = kDone + 8, kMostBytes = 227 * 1024, kAlignment = 1024;
    // Where there is no room to align it, dynamic shared memory has to begin at a multiple. It does: before it lie only
    // the system's 1024 bytes, as load_backward checks. Were it declared to be aligned, ptxas would spill.
    static constexpr int kBytes = kEnd + kAlignment <= kMostBytes ? kEnd + kAlignment : kEnd;
    static_assert(kBytes <= kMostBytes);

    char* base;  // aligned

    __device__ __forceinline__ explicit BackwardMemory(char* raw)
        : base(raw + (-shared_address(raw) & (kAlignment - 1))) {}
    // Addresses that are the same in every step are taken anew in each, or the descriptors of a loop would all stay.
    __device__ __forceinline__ SharedAddress k() const { return opaque(shared_address(base) + kK); }
    __device__ __forceinline__ SharedAddress v() const { return opaque(shared_address(base) + kV); }
    __device__ __forceinline__ SharedAddress q(unsigned step) const {
        return shared_address(base) + kQ + step % Config::kQStages * Config::kQBytes;
    }
    __device__ __forceinline__ SharedAddress dout(unsigned step) const {
        return shared_address(base) + kDout + step % Config::kDoutStages * Config::kDoutBytes;
    }
    __device__ __forceinline__ SharedAddress logits(unsigned which) const {
        return opaque(shared_address(base) + kLogits + which % 2 * Config::kLogitsBytes);
    }
    __device__ __forceinline__ SharedAddress dq() const { return opaque(shared_address(base) + kDq); }
    // With the queries.
    __device__ __forceinline__ const EightRows* rows(unsigned step) const {
        return reinterpret_cast<const EightRows*>(base + kRows + step % Config::kQStages * Config::kRowsBytes);
    }
    __device__ __forceinline__ StepMessage& step_message(unsigned step) const {
        return reinterpret_cast<StepMessage*>(base + kStepMessages)[step % kSteps];
    }
    __device__ __forceinline__ KeyTileMessage& tile_message(int turn) const {
        return reinterpret_cast<KeyTileMessage*>(base + kTiles)[static_cast<unsigned>(turn) % kTileMessages];
    }
    __device__ __forceinline__ QueryRun& query_run(unsigned number) const {
        return reinterpret_cast<QueryRun*>(base + kRunMessages)[number % kRuns];
    }
    __device__ __forceinline__ KeyTile& tile_in_work() const { return *reinterpret_cast<KeyTile*>(base + kTileInWork); }
    // Set before the last arrival at the barriers of the reducer.
    __device__ __forceinline__ volatile int& done() const { return *reinterpret_cast<volatile int*>(base + kDone); }
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
    // How often the stage was used before, for the parity to wait for.
    __device__ __forceinline__ static int q_parity(unsigned step) { return step / Config::kQStages & 1; }
    __device__ __forceinline__ static int dout_parity(unsigned step) { return step / Config::kDoutStages & 1; }

    // By one thread.
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
        done() = 0;
        fence_mbarrier_init();
    }

private:
    __device__ __forceinline__ Mbarrier barrier(int index) const {
        return {shared_address(base) + kBarriers + 8 * index};
    }
};

// Named barriers. Those of the gradient of queries: one for each consumer warpgroup, with the warp of the reducer.
enum BackwardBarrier { kLogitsWritten = 1, kLogitsRead = 2, kRowsCleaned = 3, kDqEmpty = 4, kDqFull = 7 };
inline constexpr int kDqThreads = kWarpgroupThreads + 32;

}  // namespace jaxmagi::sm90
