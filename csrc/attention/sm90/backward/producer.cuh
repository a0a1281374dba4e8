#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/tma.cuh"

// The producer warp loads keys, values, queries and dO into shared memory. One lane issues everything. It has few
// registers and reads runs in shared memory.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardProducer {
    BackwardMemory<Config> memory;
    const BackwardTensorMaps& maps;
    const BackwardArguments& args;
    unsigned step = 0, end_step = 0;  // the next one to load; the first one of the next work item

    // Called by one lane.
    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (unsigned index = 0;; ++index) {
            memory.run_full(index).wait(memory.run_parity(index));
            const BackwardBandRun& run = memory.band_run(index);
            const int num_steps = memory.work_item(run.item).num_steps;
            if (run.first) {
                load_keys(run, num_steps);
                end_step = step + num_steps;
            }
            if (num_steps < 0)
                break;
            load_blocks(run);
            memory.run_empty(index).arrive();
        }
        end_steps();
    }

private:
    // Tells the warps of the reducer, of which one may wait for the next step and one for the step after it, that there
    // are no more. As before any other step, the consumers have to be done with what the second descriptor overwrites.
    __device__ __forceinline__ void end_steps() {
        for (const unsigned end = step + 2; step < end; ++step) {
            memory.descriptor(step).head = -1;
            memory.described(step).arrive();
            memory.q_empty(step).wait(memory.q_parity(step) ^ 1);
        }
    }

    // Loads keys and values once the consumers released those of the work item before.
    __device__ __forceinline__ void load_keys(const BackwardBandRun& run, int num_steps) const {
        memory.kv_empty().wait((run.item & 1) ^ 1);
        if (num_steps <= 0) {
            memory.kv_full().arrive();
            return;
        }
        const bool own = run.key < args.own_end;
        memory.kv_full().arrive_and_expect(Config::kKBytes + Config::kVBytes);
        const Coordinates at{0, run.key_head, run.key, run.example};
        load<Config::kDim>(memory.k(), own ? maps.own_k : maps.k, Config::kKeys, at, memory.kv_full());
        load<Config::kVDim>(memory.v(), own ? maps.own_v : maps.v, Config::kKeys, at, memory.kv_full());
    }

    // Loads the blocks of a run, from the last to the first unless the tile is mirrored: under a causal mask all tiles
    // have the last block, so that CTAs that began together with different tiles need the same queries, and find them
    // in the L2 cache.
    __device__ __forceinline__ void load_blocks(const BackwardBandRun& run) {
        const int stride = run.mirrored ? 1 : -1;
        int block = run.mirrored ? run.blocks.begin : run.blocks.end - 1;
#pragma unroll 1
        for (int left = run.blocks.end - run.blocks.begin; left > 0; --left, block += stride, ++step) {
            load_queries(run, block);
            load_dout(run, block);
        }
    }

    __device__ __forceinline__ void load_queries(const BackwardBandRun& run, int block) const {
        const int first = run.origin + block * Config::kRows;
        const int any_head = run.example * args.heads + run.head;  // of all examples
        const int head_row = any_head * args.workspace.rows_per_head, row = head_row + first;
        describe(run, block, first, any_head, head_row * Config::kSumPanels + first);
        memory.described(step).arrive();
        memory.q_empty(step).wait(memory.q_parity(step) ^ 1);
        const Mbarrier full = memory.q_full(step);
        full.arrive_and_expect(Config::kQBytes + Config::kRowsBytes);
        load<Config::kDim>(memory.q(step), maps.q, Config::kRows, {0, run.head, first, run.example}, full);
        bulk_load(shared_address(memory.rows(step)), args.workspace.rows + row / 8, Config::kRowsBytes, full);
    }

    __device__ __forceinline__ void describe(const BackwardBandRun& run, int block, int first, int head,
                                             int row) const {
        StepDescriptor& descriptor = memory.descriptor(step);
        descriptor.key_begin = run.key_begin;
        descriptor.key_end = run.key_end;
        // The limits are bounded, so that sums of them and rows do not overflow.
        descriptor.lower = max(run.lower - first, -kUnbounded);
        descriptor.upper = min(run.upper - first, run.end_query - first);
        descriptor.first_column = run.first_query - first;
        descriptor.end_column = run.end_query - first;
        descriptor.masked = block < run.unmasked.begin or block >= run.unmasked.end;
        descriptor.last = step + 1 == end_step;
        descriptor.mirrored = run.mirrored;
        descriptor.head = head;
        descriptor.row = row;
        descriptor.mask = run.mask;
        descriptor.block = block;
        descriptor.band = run.band;
        descriptor.tile = run.tile;
    }

    __device__ __forceinline__ void load_dout(const BackwardBandRun& run, int block) const {
        memory.dout_empty(step).wait(memory.dout_parity(step) ^ 1);
        const Mbarrier full = memory.dout_full(step);
        full.arrive_and_expect(Config::kDoutBytes);
        load<Config::kVDim>(memory.dout(step), maps.dout, Config::kRows,
                            {0, run.head, run.origin + block * Config::kRows, run.example}, full);
    }

    template <int kColumns>
    __device__ __forceinline__ static void load(SharedAddress to, const CUtensorMap& map, int rows,
                                                const Coordinates& from, Mbarrier arrived) {
#pragma unroll
        for (int panel = 0; panel < panels(kColumns); ++panel)
            tma_load(to + panel * rows * kPanelRowBytes, map, {panel * kPanelColumns, from.y, from.z, from.w}, arrived);
    }
};

}  // namespace jaxmagi::sm90
