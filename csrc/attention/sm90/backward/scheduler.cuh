#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/bits.cuh"

// The scheduler warp: takes tiles of keys and finds the blocks of queries that see them, a run for each band, for the
// producer. It works ahead, so that neither the counter of items nor the bands are waited for between two tiles.
//
// Bands are those of a plan by keys, and so transposed: their rows are keys, their columns queries.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardScheduler {
    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int lane;
    unsigned num_runs = 0;  // sent so far

    __device__ __forceinline__ void run() {
        if (lane == 0)
            memory.current_tile().item = -1;
#pragma unroll 1
        for (int item = take_item(); item < args.schedule.num_items; item = take_item()) {
            find_tile(item_at(args.schedule, item));
            schedule();
            // Whoever takes a tile long before it begins with it may keep it from others that could.
            memory.run_empty(num_runs - 1).wait(memory.run_parity(num_runs - 1));
        }
        await_room();
        __syncwarp();
        if (lane == 0)
            memory.work_item(begin_tile().item).num_steps = -1;
        send_empty();
    }

private:
    // Whatever a tile may wait for, where sums have an order, was taken before it, by a CTA that runs.
    __device__ __forceinline__ int take_item() const {
        int taken = 0;
        if (lane == 0)
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(taken) : "l"(args.workspace.counter) : "memory");
        return __shfl_sync(~0u, taken, 0);
    }

    // By one lane.
    __device__ __forceinline__ CurrentTile& begin_tile() const {
        CurrentTile& tile = memory.current_tile();
        ++tile.item;
        tile.has_no_run = true;
        return tile;
    }

    __device__ __forceinline__ void find_tile(const BackwardItem& item) const {
        const int64_t first = int64_t{item.mask} * args.schedule.num_tiles;
        int rank = item.rank;
        if (args.deterministic)
            rank = args.workspace.places[first + rank];
        __syncwarp();
        if (lane == 0) {
            const ScheduledTile scheduled = args.tiles[first + rank];
            CurrentTile& tile = begin_tile();
            tile.key = scheduled.tile * Config::kKeys;
            tile.first_band = scheduled.first_band;
            tile.end_band = scheduled.end_band;
            tile.mask = item.mask;
            tile.bands = args.bands + int64_t{item.mask} * args.capacity;
            tile.key_head = item.key_head % args.kv_heads;
            tile.example = item.mask + item.key_head / args.kv_heads;
        }
        __syncwarp();
    }

    __device__ __forceinline__ void schedule() {
        const int num_blocks = count_blocks();
        await_room();
        announce(num_blocks);
        __syncwarp();
        if (num_blocks == 0)
            send_empty();
        else
            send_runs();
    }

    // The i-th band, and the blocks of queries that see keys of the tile in it. Those of the tile count also where
    // they do not exist.
    struct Found {
        Band band;
        Range blocks;
        int origin;
    };

    __device__ __forceinline__ Found find(int index) const {
        const CurrentTile& tile = memory.current_tile();
        if (index < tile.first_band or index >= tile.end_band)
            return {};
        const int4* words = reinterpret_cast<const int4*>(tile.bands + index);
        const int4 ranges = __ldg(words);
        const int2 limits = __ldg(reinterpret_cast<const int2*>(words + 1));
        const Band band{ranges.x, ranges.y, ranges.z, ranges.w, limits.x, limits.y};
        const Range queries = keys_of_rows(band, {tile.key, tile.key + Config::kKeys});
        if (is_empty(queries))
            return {band, {0, 0}};
        const int origin = begins_blocks_anywhere() ? queries.begin % Config::kRows / 8 * 8 : 0;
        return {band, {queries.begin / Config::kRows, ceil_div(queries.end - origin, Config::kRows)}, origin};
    }

    // Whether the first block of a run begins with the first query that sees a key, rounded down to a multiple of 8.
    // Where sums have an order, blocks count the additions to them, and so are the same in every run.
    __device__ __forceinline__ bool begins_blocks_anywhere() const {
        return Config::kTransposedDq and not args.deterministic;
    }

    __device__ __forceinline__ int count_blocks() const {
        const CurrentTile& tile = memory.current_tile();
        int count = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i < tile.end_band; i += 32) {
            const Range blocks = find(i).blocks;
            count += blocks.end - blocks.begin;
        }
        return __reduce_add_sync(~0u, count);
    }

    // A bit for each of 32 keys that anyone sees, or that do not exist.
    __device__ __forceinline__ uint32_t seen_keys_from(int first) const {
        const CurrentTile& tile = memory.current_tile();
        uint32_t seen = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i < tile.end_band; i += 32) {
            const ScheduledBand* band = tile.bands + i;
            seen |= low_bits(__ldg(&band->q1) - first) & ~low_bits(__ldg(&band->q0) - first);
        }
        return __reduce_or_sync(~0u, seen) | ~low_bits(args.kv_len - first);
    }

    __device__ __forceinline__ void announce(int num_blocks) const {
        const CurrentTile& tile = memory.current_tile();
        BackwardWorkItem& message = memory.work_item(tile.item);
        bool all_seen = true;
#pragma unroll 1
        for (int word = 0; word < Config::kKeys / 32; ++word) {
            const uint32_t seen = seen_keys_from(tile.key + 32 * word);
            all_seen = all_seen and seen == ~0u;
            if (lane == 0)
                message.visible[word] = seen;
        }
        if (lane != 0)
            return;
        message.num_steps = num_blocks * args.schedule.group;
        message.key = tile.key;
        message.key_head = tile.key_head;
        message.example = tile.example;
        message.all_visible = all_seen;
    }

    // Where sums have an order, from the last band to the first: see BackwardReducer.
    __device__ __forceinline__ void send_runs() {
        const CurrentTile& tile = memory.current_tile();
#pragma unroll 1
        for (int i = lane; i - lane < tile.end_band - tile.first_band; i += 32)
            send_runs_of_bands(args.deterministic ? tile.end_band - 1 - i : tile.first_band + i);
    }

    // Of the bands of all lanes.
    __device__ __forceinline__ void send_runs_of_bands(int index) {
        const Found own = find(index);
#pragma unroll 1
        for (unsigned live = __ballot_sync(~0u, not is_empty(own.blocks)); live != 0; live &= live - 1) {
            await_room();
            if (lane == __ffs(live) - 1) {
                describe(own, index);
                finish_run();
            }
            ++num_runs;
            __syncwarp();
        }
    }

    // From one lane.
    __device__ __forceinline__ void describe(const Found& found, int band_index) const {
        const CurrentTile& tile = memory.current_tile();
        const Band& band = found.band;
        BackwardBandRun& run = memory.band_run(num_runs);
        run.key_begin = band.q0 - tile.key;
        run.key_end = band.q1 - tile.key;
        run.lower = band.lo + tile.key;
        run.upper = min(band.hi, kUnbounded - 1) + tile.key + 1;
        run.first_query = band.k0;
        run.end_query = band.k1;
        run.origin = found.origin;
        run.blocks = found.blocks;
        run.band = band_index;
        run.first_head = tile.key_head * args.schedule.group;
        const bool holds_keys = band.q0 <= tile.key and tile.key + Config::kKeys <= band.q1;
        // All of a block's queries see all keys if it lies between these, counted from the origin.
        const int from = max(band.k0, band.lo + tile.key + Config::kKeys - 1) - found.origin;
        const int to = min(band.k1, run.upper) - found.origin;
        run.unmasked = {ceil_div(max(from, 0), Config::kRows), holds_keys ? max(to, 0) / Config::kRows : 0};
    }

    // From one lane.
    __device__ __forceinline__ void finish_run() const {
        CurrentTile& tile = memory.current_tile();
        BackwardBandRun& run = memory.band_run(num_runs);
        run.item = tile.item;
        run.first = tile.has_no_run;
        tile.has_no_run = false;
        run.key = tile.key;
        run.key_head = tile.key_head;
        run.example = tile.example;
        run.mask = tile.mask;
        memory.run_full(num_runs).arrive();
    }

    // For a tile without blocks, or behind the last tile.
    __device__ __forceinline__ void send_empty() {
        if (lane == 0) {
            memory.band_run(num_runs).blocks = {0, 0};
            finish_run();
        }
        ++num_runs;
        __syncwarp();
    }

    __device__ __forceinline__ void await_room() const {
        memory.run_empty(num_runs).wait(memory.run_parity(num_runs) ^ 1);
    }
};

}  // namespace jaxmagi::sm90
