#pragma once

#include "csrc/attention/sm90/forward_arguments.cuh"
#include "csrc/attention/sm90/forward_config.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/tma.cuh"

// The producer warp: streams queries, keys and values through shared memory.
//
// The scheduler's runs of keys become blocks, right to left, from the last key that is seen to the first. What is left
// over goes to the first block, which is masked most of the time: of its keys those do not count which the next block
// has too. So no block holds a key which the tile does not see: NaN there must not reach the product with the values.
// Only a run shorter than one block may hold foreign keys behind its end; their values are overwritten with zeros.

namespace jaxmagi::sm90 {

// A run of keys as the positions of its tile see it, counted from the first one.
struct TileRun {
    int row_begin, row_end, last_row;  // those of the band; the last one that exists
    int lower, upper;                  // of column limits in BlockMessage, for a block that begins at key 0

    __device__ __forceinline__ TileRun(const Band& band, int row, int last_row)
        : row_begin(band.q0 - row), row_end(band.q1 - row), last_row(last_row), lower(band.lo + row),
          upper(min(band.hi, kUnbounded - 1) + row + 1) {}

    // Of keys from first_key on, those at columns [begin, end).
    __device__ __forceinline__ BlockMessage block(int first_key, int begin, int end, int block_keys) const {
        const int from = lower - first_key, to = min(upper - first_key, end);  // so that sums do not overflow
        const bool seen_by_all = row_begin <= 0 and last_row < row_end and from <= -last_row and to == block_keys;
        return {row_begin, row_end, from, to, begin, end, not seen_by_all or begin != 0};
    }
};

template <typename Config> struct ForwardProducer {
    ForwardMemory<Config> memory;
    const ForwardTensorMaps& maps;
    const ForwardArguments& args;
    unsigned num_blocks = 0;  // produced so far
    int pending_key = kNone;  // first key of the newest block, if its values are still to be loaded
    int num_cleaned = 0;      // blocks whose values were cleaned

    static constexpr int kNone = -1;

    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (unsigned run = 0;; ++run) {
            memory.run_full(run).wait(memory.run_parity(run));
            const RunMessage& message = memory.run_message(run);
            const TileMessage& tile = memory.tile_message(message.turn);
            if (tile.num_blocks > 0)
                produce(message, tile);
            else
                announce_empty(message.turn);
            if (tile.num_blocks < 0)
                return;
            const bool last = message.last;
            __syncwarp();
            if (elect_lane())
                memory.run_empty(run).arrive();
            if (last)
                load_pending_values(tile, memory.v_full(num_blocks - 1));
        }
    }

private:
    __device__ __forceinline__ void announce_empty(int turn) const {
        memory.q_empty().wait((turn & 1) ^ 1);
        if (elect_lane())
            memory.q_full().arrive();
    }

    __device__ __forceinline__ void produce(const RunMessage& message, const TileMessage& tile) {
        if (elect_lane())
            produce_blocks(message, tile);
        __syncwarp();
        const Range run{message.band.k0, message.band.k1};
        const int size = run.end - run.begin;
        num_blocks += ceil_div(size, Config::kKeys);
        pending_key = run.begin;
        if (size < Config::kKeys and run.end < args.kv_len)
            load_and_clean_values(tile, size);
    }

    // From right to left. The first keys of a tile are loaded before its queries, whose place becomes free later;
    // values after the keys of the next block, which are needed first. Warps of consumers share the issue slots: every
    // instruction in this loop makes them wait.
    __device__ __forceinline__ void produce_blocks(const RunMessage& message, const TileMessage& at) const {
        const TileMessage tile = at;
        const Band run = message.band;
        const int num_rows = min(Config::kRows >> args.schedule.pack_shift, args.q_len - tile.row);
        const TileRun rows(run, tile.row, num_rows - 1);
        constexpr int kStep = Config::kKeys;
        bool queries_due = message.first;
        unsigned block = num_blocks;
        int previous_key = pending_key;
        const int size = run.k1 - run.k0, over = size % Config::kKeys;
        int begin = over == 0 or size < kStep ? 0 : kStep - over;  // the first column that counts
#pragma unroll 1
        for (int key = max(run.k1 - kStep, run.k0); key >= run.k0; key += begin - kStep, begin = 0, ++block) {
            load_keys(block, rows.block(key, begin, min(kStep, run.k1 - key), kStep), key, tile);
            if (queries_due)
                load_queries(message.turn);
            queries_due = false;
            if (previous_key != kNone)
                load_values(block - 1, previous_key, tile, memory.v_full(block - 1));
            previous_key = key;
        }
    }

    __device__ __forceinline__ void load_queries(int turn) const {
        memory.q_empty().wait((turn & 1) ^ 1);
        const TileMessage& tile = memory.tile_message(turn);
        memory.q_full().arrive_and_expect(Config::kQBytes);
        load<Config::kDim>(memory.q(), maps.q, Config::kRows, {0, tile.head, tile.row, tile.example},
                           memory.q_full());
    }

    __device__ __forceinline__ void load_keys(unsigned block, const BlockMessage& message, int key,
                                              const TileMessage& tile) const {
        memory.k_empty(block).wait(memory.parity(block) ^ 1);
        memory.block_message(block) = message;
        memory.k_full(block).arrive_and_expect(Config::kKBytes);
        load<Config::kDim>(memory.k(block), maps.k, Config::kKeys,
                           {0, tile.key_head, key, tile.example}, memory.k_full(block));
    }

    __device__ __forceinline__ void load_values(unsigned block, int key, const TileMessage& tile,
                                                Mbarrier arrived) const {
        memory.v_empty(block).wait(memory.parity(block) ^ 1);
        arrived.arrive_and_expect(Config::kVBytes);
        load<Config::kVDim>(memory.v(block), maps.v, Config::kKeys,
                            {0, tile.key_head, key, tile.example}, arrived);
    }

    // By the whole warp.
    __device__ __forceinline__ void load_pending_values(const TileMessage& tile, Mbarrier arrived) {
        if (pending_key != kNone and elect_lane())
            load_values(num_blocks - 1, pending_key, tile, arrived);
        pending_key = kNone;
    }

    // Loads the values of a short run, its newest block, and puts zeros behind the last row.
    __device__ __forceinline__ void load_and_clean_values(const TileMessage& tile, int first_row) {
        constexpr int kVectors = kPanelRowBytes / 16;
        const unsigned block = num_blocks - 1;
        load_pending_values(tile, memory.v_loaded());
        memory.v_loaded().wait(num_cleaned++ & 1);
        for (int i = first_row * kVectors + threadIdx.x % 32; i < Config::kKeys * kVectors; i += 32) {
#pragma unroll
            for (int panel = 0; panel < panels(Config::kVDim); ++panel)
                store_zeros(memory.v(block) + panel * Config::kKeys * kPanelRowBytes + i * 16);
        }
        fence_shared_for_async();
        __syncwarp();
        if (elect_lane())
            memory.v_full(block).arrive();
    }

    __device__ __forceinline__ static void store_zeros(SharedAddress to) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }

    template <int kColumns>
    __device__ __forceinline__ static void load(SharedAddress to, const CUtensorMap& map, int rows, Coordinates at,
                                                Mbarrier arrived) {
#pragma unroll
        for (int panel = 0; panel < panels(kColumns); ++panel)
            tma_load(to + panel * rows * kPanelRowBytes, map, {panel * kPanelColumns, at.y, at.z, at.w}, arrived);
    }
};

}  // namespace jaxmagi::sm90
