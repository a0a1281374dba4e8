#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/tma.cuh"

// The producer warp: streams keys, values, queries and cotangents of the output through shared memory. One lane does
// it all; it reads runs where they are, since it has few registers.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardProducer {
    static constexpr int kChunkBlocks = 8192 / Config::kRows;

    BackwardMemory<Config> memory;
    const BackwardTensorMaps& maps;
    const BackwardArguments& args;
    unsigned step = 0;  // the next one

    // By one lane.
    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (unsigned number = 0;; ++number) {
            memory.run_full(number).wait(memory.run_parity(number));
            const BackwardBandRun& run = memory.band_run(number);
            const int num_steps = memory.work_item(run.item).num_steps;
            if (run.first)
                load_keys(run, num_steps);
            if (num_steps < 0)
                return;
            load_blocks(run);
            memory.run_empty(number).arrive();
        }
    }

private:
    // Once the tile before is done with.
    __device__ __forceinline__ void load_keys(const BackwardBandRun& run, int num_steps) const {
        memory.kv_empty().wait((run.item & 1) ^ 1);
        if (num_steps <= 0) {
            memory.kv_full().arrive();
            return;
        }
        memory.kv_full().arrive_and_expect(Config::kKBytes + Config::kVBytes);
        const Coordinates at{0, run.key_head, run.key, run.example};
        load<Config::kDim>(memory.k(), maps.k, Config::kKeys, at, memory.kv_full());
        load<Config::kVDim>(memory.v(), maps.v, Config::kKeys, at, memory.kv_full());
    }

    // From the last block to the first, since under a causal mask all tiles have the last one: CTAs that began together
    // with keys of different tiles are at the same queries, and find them in the L2 cache. Query heads take turns at
    // chunks of blocks. At every block, a group of 8 heads would go through more than the cache holds before the tile
    // next to this one comes to the same queries; over a whole sequence, tiles of different lengths would drift apart.
    __device__ __forceinline__ void load_blocks(const BackwardBandRun& run) {
#pragma unroll 1
        for (int end = run.blocks.end; end > run.blocks.begin;) {
            const int begin = max((end - 1) / kChunkBlocks * kChunkBlocks, run.blocks.begin);
#pragma unroll 1
            for (int head = 0; head < args.schedule.group; ++head)
                load_chunk(run, {begin, end}, run.first_head + head);
            end = begin;
        }
    }

    __device__ __forceinline__ void load_chunk(const BackwardBandRun& run, Range blocks, int head) {
#pragma unroll 1
        for (int block = blocks.end - 1; block >= blocks.begin; --block, ++step) {
            load_queries(run, block, head);
            load_dout(run, block, head);
        }
    }

    __device__ __forceinline__ void load_queries(const BackwardBandRun& run, int block, int head) const {
        const int first = run.origin + block * Config::kRows;
        const int row = (run.example * args.heads + head) * args.workspace.rows_per_head + first;
        describe(run, block, first, row);
        memory.q_empty(step).wait(memory.q_parity(step) ^ 1);
        const Mbarrier full = memory.q_full(step);
        full.arrive_and_expect(Config::kQBytes + Config::kRowsBytes);
        load<Config::kDim>(memory.q(step), maps.q, Config::kRows, {0, head, first, run.example}, full);
        bulk_load(shared_address(memory.rows(step)), args.workspace.rows + row / 8, Config::kRowsBytes, full);
    }

    __device__ __forceinline__ void describe(const BackwardBandRun& run, int block, int first, int row) const {
        StepDescriptor& message = memory.descriptor(step);
        message.key_begin = run.key_begin;
        message.key_end = run.key_end;
        // Bounded, so that sums do not overflow.
        message.lower = max(run.lower - first, -kUnbounded);
        message.upper = min(run.upper - first, run.end_query - first);
        message.first_column = run.first_query - first;
        message.end_column = run.end_query - first;
        message.masked = block < run.unmasked.begin or block >= run.unmasked.end;
        message.row = row;
        message.mask = run.mask;
        message.block = block;
        message.band = run.band;
        message.tile = run.key / Config::kKeys;
    }

    __device__ __forceinline__ void load_dout(const BackwardBandRun& run, int block, int head) const {
        memory.dout_empty(step).wait(memory.dout_parity(step) ^ 1);
        const Mbarrier full = memory.dout_full(step);
        full.arrive_and_expect(Config::kDoutBytes);
        load<Config::kVDim>(memory.dout(step), maps.dout, Config::kRows,
                            {0, head, run.origin + block * Config::kRows, run.example}, full);
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
