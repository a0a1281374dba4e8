#pragma once

#include "csrc/attention/sm90/forward_arguments.cuh"
#include "csrc/attention/sm90/forward_config.cuh"
#include "csrc/common/math.h"

// The scheduler warp: takes tiles and finds the runs of keys that their rows see, one of every band, for the producer.
// It works ahead, so that neither the counter of tiles nor the bands are waited for between two tiles.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardScheduler {
    ForwardMemory<Config> memory;
    const ForwardArguments& args;
    int lane;
    unsigned num_runs = 0;  // sent so far

    __device__ __forceinline__ void run() {
        int turn = 0, item = blockIdx.x;
#pragma unroll 1
        while (item < args.schedule.num_items) {
            const unsigned first_run = num_runs;
            const bool is_long = schedule(item_at(args.schedule, item), turn);
            if (num_runs != first_run)
                await_producer(is_long ? 1 : num_runs - first_run + 1);
            item = next_item();
        }
        send(turn, {.num_blocks = -1});
        send_run(0, {.band = {}, .turn = turn, .first = true, .last = true});
    }

private:
    // A CTA that takes a tile long before it can begin with it may keep it from others that could, and end late. So the
    // next one is taken when the producer begins with this one or, if this one has more blocks than these, when all its
    // keys are on their way.
    static constexpr int kManyBlocks = 32;

    // Until fewer runs wait for the producer.
    __device__ __forceinline__ void await_producer(unsigned num_waiting) const {
        const unsigned run = num_runs - min(num_waiting, ForwardMemory<Config>::kRuns);
        memory.run_empty(run).wait(memory.run_parity(run));
    }

    __device__ __forceinline__ int next_item() const {
        int taken = args.schedule.num_items;
        if (lane == 0 and gridDim.x < args.schedule.num_items)
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(taken) : "l"(args.counter) : "memory");
        return gridDim.x + __shfl_sync(~0u, taken, 0);
    }

    // Returns whether there are many blocks. Behind the last position there is nothing to do.
    __device__ __forceinline__ bool schedule(const ForwardItem& item, int& turn) {
        const PlannedTile tile = args.tiles[static_cast<int64_t>(item.plan) * args.schedule.num_tiles + item.rank];
        const PlannedBand* bands = args.bands + static_cast<int64_t>(item.plan) * args.capacity;
        const int example = item.plan + item.key_head / args.kv_heads, key_head = item.key_head % args.kv_heads;
        const int num_rows = Config::kRows >> args.schedule.pack_shift;
        const int row = tile.tile * Config::kRows + item.slice * num_rows;
        const int head = key_head * args.schedule.group + item.head_in_group;
        if (row >= args.q_len)
            return false;
        const Range rows{row, min(row + num_rows, args.q_len)};
        const int num_blocks = count_blocks(bands, tile, rows);
        send(turn, {num_blocks, row, head, example, key_head});
        if (num_blocks == 0)
            send_run(0, {.band = {}, .turn = turn, .first = true, .last = true});
        int left = num_blocks;
        bool first = true;
#pragma unroll 1
        for (int i = tile.first_band; i < tile.end_band; i += 32) {
            const Band band = seen_part(bands, i + lane, tile.end_band, rows);
            for (unsigned live = __ballot_sync(~0u, band.k0 < band.k1); live != 0; live &= live - 1) {
                const int sender = __ffs(live) - 1;
                const int size = __shfl_sync(~0u, band.k1 - band.k0, sender);
                left -= ceil_div(size, Config::kKeys);
                send_run(sender, {band, turn, first, left == 0});
                first = false;
            }
        }
        ++turn;
        return num_blocks > kManyBlocks;
    }

    __device__ __forceinline__ int count_blocks(const PlannedBand* bands, const PlannedTile& tile, Range rows) const {
        int count = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i - lane < tile.end_band; i += 32) {
            const Band band = seen_part(bands, i, tile.end_band, rows);
            count += ceil_div(band.k1 - band.k0, Config::kKeys);
        }
        return __reduce_add_sync(~0u, count);
    }

    // The band, with only those keys that the rows see; none behind the last band.
    __device__ __forceinline__ static Band seen_part(const PlannedBand* bands, int index, int end, Range rows) {
        if (index >= end)
            return {};
        const int4* words = reinterpret_cast<const int4*>(bands + index);
        const int4 ranges = __ldg(words);
        const int2 limits = __ldg(reinterpret_cast<const int2*>(words + 1));
        Band band{ranges.x, ranges.y, ranges.z, ranges.w, limits.x, limits.y};
        const Range keys = keys_of_rows(band, rows);
        band.k0 = keys.begin;
        band.k1 = max(keys.begin, keys.end);
        return band;
    }

    // The message of a tile, once there is room for its first run.
    __device__ __forceinline__ void send(int turn, const TileMessage& message) const {
        await_room();
        if (lane == 0)
            memory.tile_message(turn) = message;
        __syncwarp();
    }

    // From one lane.
    __device__ __forceinline__ void send_run(int sender, const RunMessage& message) {
        await_room();
        if (lane == sender) {
            memory.run_message(num_runs) = message;
            memory.run_full(num_runs).arrive();
        }
        ++num_runs;
    }

    __device__ __forceinline__ void await_room() const {
        memory.run_empty(num_runs).wait(memory.run_parity(num_runs) ^ 1);
    }
};

}  // namespace jaxmagi::sm90
