#pragma once

#include "csrc/attention/sm90/forward/arguments.cuh"
#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/bits.cuh"

// The scheduler warp: takes tiles and finds the runs of keys that their rows see, one of every band, for the producer.
// It works ahead, so that neither the counter of tiles nor the bands are waited for between two tiles.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardScheduler {
    ForwardMemory<Config> memory;
    const ForwardArguments& args;
    unsigned num_runs = 0;  // sent so far

    __device__ __forceinline__ void run() {
        int turn = 0, item = blockIdx.x;
#pragma unroll 1
        while (item < args.schedule.num_items) {
            schedule(item_at(args.schedule, item), turn);
            item = next_item();
        }
        send(turn, {.num_blocks = -1});
        send_empty_run(turn, true);
    }

private:
    // A lane's run among those of 32 bands, of which two neighbours may share the block for what is left over of them.
    struct LaneRun {
        Band band;      // with the keys that are seen
        int given;      // how many of them, the last ones, are in the first block of the run before
        bool is_host;   // whether its first block takes keys of the next run
        unsigned live;  // bits of lanes with keys

        __device__ __forceinline__ int num_blocks() const {
            return ceil_div(band.k1 - band.k0 - given, Config::kKeys);
        }
    };

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
        if (lane_index() == 0 and grid_size() < args.schedule.num_items)
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(taken) : "l"(args.counter) : "memory");
        return grid_size() + __shfl_sync(~0u, taken, 0);
    }

    // Behind the last position there is nothing to do.
    __device__ __forceinline__ void schedule(const ForwardItem& item, int& turn) {
        const ScheduledTile tile = args.tiles[static_cast<int64_t>(item.mask) * args.schedule.num_tiles + item.rank];
        const ScheduledBand* bands = args.bands + static_cast<int64_t>(item.mask) * args.capacity;
        const int example = item.mask + item.key_head / args.kv_heads, key_head = item.key_head % args.kv_heads;
        const int num_rows = Config::kRows >> args.schedule.pack_shift;
        const int row = tile.tile * Config::kRows + item.slice * num_rows;
        const int head = key_head * args.schedule.group + item.head_in_group;
        if (row >= args.q_len)
            return;
        const Range rows{row, min(row + num_rows, args.q_len)};
        const int num_blocks = count_blocks(bands, tile, rows);
        send(turn, {num_blocks, row, head, example, key_head, num_runs});
        if (num_blocks == 0)
            send_empty_run(turn, false);
        int left = num_blocks;
#pragma unroll 1
        for (int i = tile.first_band; i < tile.end_band; i += 32) {
            const LaneRun run = find_run(bands, i, tile.end_band, rows);
            for (unsigned live = run.live; live != 0; live &= live - 1) {
                const int sender = __ffs(live) - 1;
                left -= __shfl_sync(~0u, run.num_blocks(), sender);
                await_room();
                if (lane_index() == sender)
                    describe(run, turn, left);
                ++num_runs;
            }
        }
        const TileMessage& sent = memory.tile_message(turn++);
        await_producer(sent.num_blocks > kManyBlocks ? 1 : num_runs - sent.first_run + 1);
    }

    // By one lane.
    __device__ __forceinline__ void describe(const LaneRun& run, int turn, int left) const {
        const TileMessage& tile = memory.tile_message(turn);
        RunMessage& message = memory.run_message(num_runs);
        const int last_row = min(Config::kRows >> args.schedule.pack_shift, args.q_len - tile.row) - 1;
        message.band = TileBand::make(run.band, tile.row, last_row);
        message.keys = {run.band.k0, run.band.k1};
        message.head = {tile.key_head, tile.example};
        message.turn = turn;
        message.first = left + run.num_blocks() == tile.num_blocks;
        message.last = left == 0;
        message.stop = false;
        message.has_guest = run.is_host;
        message.given = run.given;
        memory.run_full(num_runs).arrive();
    }

    __device__ __forceinline__ int count_blocks(const ScheduledBand* bands, const ScheduledTile& tile, Range rows) const {
        int count = 0;
#pragma unroll 1
        for (int i = tile.first_band; i < tile.end_band; i += 32)
            count += find_run(bands, i, tile.end_band, rows).num_blocks();
        return __reduce_add_sync(~0u, count);
    }

    // By the whole warp.
    __device__ __forceinline__ LaneRun find_run(const ScheduledBand* bands, int first, int end, Range rows) const {
        const int lane = lane_index();
        LaneRun run{seen_part(bands, first + lane, end, rows), 0};
        const int size = run.band.k1 - run.band.k0;
        run.live = __ballot_sync(~0u, size > 0);
        const unsigned before = run.live & low_bits(lane), after = run.live & ~low_bits(lane + 1);
        const int next_size = __shfl_sync(~0u, size, max(__ffs(after) - 1, 0));
        run.is_host = size > 0 and after != 0 and __popc(before) % 2 == 0 and fit_together(size, next_size);
        const unsigned hosts = __ballot_sync(~0u, run.is_host);
        if (size > 0 and before != 0 and (hosts >> (31 - __clz(before)) & 1))
            run.given = size % Config::kKeys;
        return run;
    }

    // Whether one block can hold what is left over of two runs, each in whole parts: first that of the second, then
    // that of the first. Parts may begin with keys that do not count there, but have to be keys that the tile sees too:
    // hence the least sizes.
    __device__ __forceinline__ static bool fit_together(int size, int next_size) {
        const int over = size % Config::kKeys, next_over = next_size % Config::kKeys;
        return size >= Config::kKeys and next_size >= Config::kKeys and over != 0 and next_over != 0 and
               ceil_div(over, kPartKeys) * kPartKeys + next_over <= Config::kKeys;
    }

    // The band, with only those keys that the rows see; none behind the last band.
    __device__ __forceinline__ static Band seen_part(const ScheduledBand* bands, int index, int end, Range rows) {
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
        if (lane_index() == 0)
            memory.tile_message(turn) = message;
        __syncwarp();
    }

    // For a tile without blocks, or behind the last tile.
    __device__ __forceinline__ void send_empty_run(int turn, bool stop) {
        await_room();
        if (lane_index() == 0) {
            memory.run_message(num_runs) = {.turn = turn, .first = true, .last = true, .stop = stop};
            memory.run_full(num_runs).arrive();
        }
        ++num_runs;
    }

    __device__ __forceinline__ void await_room() const {
        memory.run_empty(num_runs).wait(memory.run_parity(num_runs) ^ 1);
    }
};

}  // namespace jaxmagi::sm90
