#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/bits.cuh"

// The scheduler warp claims tiles of keys and finds, for each band of the mask, the run of blocks of queries that see
// keys of the tile. It does so while the consumers still work on the tile before, so that the producer waits neither
// for the counter of work items nor for the bands. Bands are transposed: their rows are keys, their columns queries.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardScheduler {
    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int lane;
    unsigned num_runs = 0;  // written so far

    __device__ __forceinline__ void run() {
        if (lane == 0)
            memory.current_tile().item = -1;
#pragma unroll 1
        for (int index = claim_index(); index < args.schedule.num_items; index = claim_index()) {
            find_tile(item_at(args.schedule, index));
            schedule();
            // A CTA that claims a tile long before it can begin with it keeps the tile from other CTAs.
            memory.run_empty(num_runs - 1).wait(memory.run_parity(num_runs - 1));
        }
        wait_for_free_run();
        __syncwarp();
        if (lane == 0)
            memory.work_item(begin_tile().item).num_steps = -1;
        write_empty_run();
    }

private:
    // Claims the next work item. Where the order of sums is fixed, all tiles that it may wait for were claimed before
    // it, by CTAs that run.
    __device__ __forceinline__ int claim_index() const {
        int claimed = 0;
        if (lane == 0)
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(claimed) : "l"(args.workspace.counter) : "memory");
        return __shfl_sync(~0u, claimed, 0);
    }

    // Called by one lane.
    __device__ __forceinline__ CurrentTile& begin_tile() const {
        CurrentTile& tile = memory.current_tile();
        ++tile.item;
        tile.has_no_run = true;
        return tile;
    }

    __device__ __forceinline__ void find_tile(const BackwardItem& item) const {
        const int64_t first = int64_t{item.mask} * args.schedule.num_tiles;
        int rank = item.rank;
        if (item.by_position)
            rank = args.workspace.tile_ranks[first + rank];
        __syncwarp();
        if (lane == 0) {
            const ScheduledTile scheduled = args.tiles[first + rank];
            CurrentTile& tile = begin_tile();
            tile.key = scheduled.tile * Config::kKeys;
            tile.first_band = scheduled.first_band;
            tile.end_band = scheduled.end_band;
            tile.mask = item.mask;
            tile.bands = args.bands + int64_t{item.mask} * args.capacity;
            const int key_head = item.head_set / args.schedule.sets_per_key_head;
            const int set = item.head_set % args.schedule.sets_per_key_head;
            tile.key_head = key_head % args.kv_heads;
            tile.example = item.mask + key_head / args.kv_heads;
            tile.first_head = tile.key_head * args.schedule.group_size + set * args.schedule.heads_per_item;
        }
        __syncwarp();
    }

    __device__ __forceinline__ void schedule() {
        const int num_blocks = count_blocks();
        wait_for_free_run();
        write_item(num_blocks);
        __syncwarp();
        if (num_blocks == 0)
            write_empty_run();
        else
            write_runs();
    }

    // A band and the blocks of queries that see keys of the tile in it. Keys of the tile that do not exist count too.
    struct LaneRun {
        Band band;
        Range blocks;
        int origin;
    };

    // Returns the run of one band, and an empty one outside the bands of the tile.
    __device__ __forceinline__ LaneRun find_run(int index) const {
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
        const int origin = blocks_begin_anywhere() ? queries.begin % Config::kRows / 8 * 8 : 0;
        return {band, {queries.begin / Config::kRows, ceil_div(queries.end - origin, Config::kRows)}, origin};
    }

    // Returns true if the first block of a run begins with the first query that sees a key, rounded down to a multiple
    // of 8. Where the order of sums is fixed, blocks are the same in every run, since the additions to them are
    // counted.
    __device__ __forceinline__ bool blocks_begin_anywhere() const {
        return Config::kTransposedDq and not args.deterministic;
    }

    __device__ __forceinline__ int count_blocks() const {
        const CurrentTile& tile = memory.current_tile();
        int count = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i < tile.end_band; i += 32) {
            const Range blocks = find_run(i).blocks;
            count += blocks.end - blocks.begin;
        }
        return __reduce_add_sync(~0u, count);
    }

    // Returns a bit for each of 32 keys: set if some query sees the key, or if it does not exist.
    __device__ __forceinline__ uint32_t visible_keys(int first) const {
        const CurrentTile& tile = memory.current_tile();
        uint32_t visible = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i < tile.end_band; i += 32) {
            const ScheduledBand* band = tile.bands + i;
            visible |= low_bits(__ldg(&band->q1) - first) & ~low_bits(__ldg(&band->q0) - first);
        }
        return __reduce_or_sync(~0u, visible) | ~low_bits(args.kv_len - first);
    }

    // Writes the work item, which the barrier of its first run publishes.
    __device__ __forceinline__ void write_item(int num_blocks) const {
        const CurrentTile& tile = memory.current_tile();
        BackwardWorkItem& work = memory.work_item(tile.item);
        bool all_visible = true;
#pragma unroll 1
        for (int word = 0; word < Config::kKeys / 32; ++word) {
            const uint32_t visible = visible_keys(tile.key + 32 * word);
            all_visible = all_visible and visible == ~0u;
            if (lane == 0)
                work.visible[word] = visible;
        }
        if (lane != 0)
            return;
        work.num_steps = num_blocks * args.schedule.heads_per_item;
        work.key = tile.key;
        work.key_head = tile.key_head;
        work.example = tile.example;
        work.all_visible = all_visible;
    }

    // Writes the runs of the tile. Where the order of sums is fixed, bands come from the last to the first, as
    // BackwardReducer explains.
    __device__ __forceinline__ void write_runs() {
        const CurrentTile& tile = memory.current_tile();
#pragma unroll 1
        for (int i = lane; i - lane < tile.end_band - tile.first_band; i += 32)
            write_runs_of_lanes(args.deterministic ? tile.end_band - 1 - i : tile.first_band + i);
    }

    // Writes the runs of 32 bands, each found by one lane.
    __device__ __forceinline__ void write_runs_of_lanes(int index) {
        const LaneRun found = find_run(index);
#pragma unroll 1
        for (unsigned nonempty = __ballot_sync(~0u, not is_empty(found.blocks)); nonempty != 0;
             nonempty &= nonempty - 1) {
            wait_for_free_run();
            if (lane == __ffs(nonempty) - 1) {
                write_run(found, index);
                publish_run();
            }
            ++num_runs;
            __syncwarp();
        }
    }

    // Called by one lane.
    __device__ __forceinline__ void write_run(const LaneRun& found, int band_index) const {
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
        run.first_head = tile.first_head;
        const bool holds_keys = band.q0 <= tile.key and tile.key + Config::kKeys <= band.q1;
        // Every query of a block sees every key if the block lies between these, counted from the origin.
        const int from = max(band.k0, band.lo + tile.key + Config::kKeys - 1) - found.origin;
        const int to = min(band.k1, run.upper) - found.origin;
        run.unmasked = {ceil_div(max(from, 0), Config::kRows), holds_keys ? max(to, 0) / Config::kRows : 0};
    }

    // Writes what a run has from its tile and hands it to the producer. Called by one lane.
    __device__ __forceinline__ void publish_run() const {
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

    // Writes the only run of a tile without blocks, or the one behind the last tile.
    __device__ __forceinline__ void write_empty_run() {
        if (lane == 0) {
            memory.band_run(num_runs).blocks = {0, 0};
            publish_run();
        }
        ++num_runs;
        __syncwarp();
    }

    __device__ __forceinline__ void wait_for_free_run() const {
        memory.run_empty(num_runs).wait(memory.run_parity(num_runs) ^ 1);
    }
};

}  // namespace jaxmagi::sm90
