#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/bits.cuh"
#include "csrc/common/sm90/system_memory.cuh"

// The scheduler warp claims work items, or parts of them, and finds the runs of blocks of queries that see keys of the
// tile: chunk by chunk of these blocks, in a chunk head by head, for each head band by band of the mask. It does so
// while the consumers still work on the tile before, so that the producer waits neither for the counter of work items
// nor for the bands. Bands are transposed: their rows are keys, their columns queries.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardScheduler {
    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int lane;
    unsigned num_runs = 0;  // written so far

    __device__ __forceinline__ void run() {
        if (lane == 0) {
            memory.current_tile().item = -1;
            memory.current_tile().stage = 0;
        }
#pragma unroll 1
        for (int claim = claim_work(); claim < memory.schedule().num_claims or goes_on(&claim); claim = claim_work()) {
            find_tile(claim);
            schedule();
            // A CTA that claims a tile long before it can begin with it keeps the tile from other CTAs.
            memory.run_empty(num_runs - 1).wait(memory.run_parity(num_runs - 1));
        }
        wait_for_free_run();
        __syncwarp();
        if (lane == 0) {
            if (args.drained != nullptr)
                store_release(args.drained, 1);
            begin_item().num_steps = -1;
        }
        write_empty_run();
    }

private:
    // Claims the next work item or part of one. Where the order of sums is fixed, all tiles that it may wait for were
    // claimed before it, by CTAs that run.
    __device__ __forceinline__ int claim_work() const {
        int claimed = 0;
        if (lane == 0) {
            int* const counter = args.counters + memory.current_tile().stage;
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(claimed) : "l"(counter) : "memory");
        }
        return __shfl_sync(~0u, claimed, 0);
    }

    // Goes on with the next stage that has work left, if its keys have arrived, and claims some.
    __device__ __forceinline__ bool goes_on(int* claim) const {
        do {
            if (not may_go_on())
                return false;
            begin_stage();
            *claim = claim_work();
        } while (*claim >= memory.schedule().num_claims);
        return true;
    }

    __device__ __forceinline__ bool may_go_on() const {
        bool may = false;
        if (lane == 0 and memory.current_tile().stage + 1 < args.num_stages) {
            const bool waits = args.arrived != nullptr and memory.current_tile().stage == 0;
            may = not waits or load_acquire(args.arrived) != 0;
            fence_global_for_async();  // for the producer's loads
        }
        return __any_sync(~0u, may);
    }

    // Other warps may read the schedule meanwhile: what they read is the same in all stages.
    __device__ __forceinline__ void begin_stage() const {
        __syncwarp();
        constexpr int kWords = sizeof(BackwardSchedule) / sizeof(int);
        static_assert(kWords <= 32);
        const CurrentTile& tile = memory.current_tile();
        const BackwardSchedule& next = args.stages[tile.stage + 1].variants[tile.variant];
        if (lane < kWords)
            reinterpret_cast<int*>(&memory.schedule())[lane] = reinterpret_cast<const int*>(&next)[lane];
        __syncwarp();
        if (lane == 0)
            ++memory.current_tile().stage;
        __syncwarp();
    }

    // Returns the next work item of the CTA. Called by one lane.
    __device__ __forceinline__ BackwardWorkItem& begin_item() const {
        CurrentTile& tile = memory.current_tile();
        tile.has_no_run = true;
        return memory.work_item(++tile.item);
    }

    __device__ __forceinline__ void find_tile(int claim) const {
        __syncwarp();
        if (lane == 0) {
            const BackwardItem item = item_at(memory.schedule(), claim);
            const int64_t first = int64_t{item.mask} * args.workspace.key_tiles;
            const ScheduledTile scheduled = args.tiles[first + schedule_rank(item, first)];
            CurrentTile& tile = memory.current_tile();
            tile.mirrored = item.order == TileOrder::kLastToFirst;
            tile.blocks = item.blocks;
            tile.index = scheduled.tile;
            tile.key = scheduled.rows.begin;
            tile.end_key = scheduled.rows.end;
            tile.first_band = scheduled.first_band;
            tile.end_band = scheduled.end_band;
            tile.mask = item.mask;
            tile.bands = args.bands + int64_t{item.mask} * args.capacity;
            const int key_head = item.head_set / memory.schedule().sets_per_key_head;
            const int set = item.head_set % memory.schedule().sets_per_key_head;
            tile.key_head = key_head % args.kv_heads;
            tile.example = item.mask + key_head / args.kv_heads;
            tile.first_head = tile.key_head * memory.schedule().group_size + set * memory.schedule().heads_per_item;
        }
        __syncwarp();
    }

    // Returns the rank of the item's tile in the tile schedule. first: the index of the first tile of its mask.
    __device__ __forceinline__ int schedule_rank(const BackwardItem& item, int64_t first) const {
        const int first_tile = memory.schedule().first_tile;
        if (item.order == TileOrder::kLongestFirst)
            return memory.schedule().num_tiles == args.workspace.key_tiles
                       ? item.rank
                       : args.workspace.longest_first[first + first_tile + item.rank];
        const bool reversed = item.order == TileOrder::kLastToFirst;
        const int position = reversed ? memory.schedule().num_tiles - 1 - item.rank : item.rank;
        return args.workspace.tile_ranks[first + first_tile + position];
    }

    // Writes the work item and its runs. Nobody needs an item without steps if dK and dV are added up, to sums that
    // begin with zeros. The last run is then an older one, or none: its barrier is new, and nobody waits.
    __device__ __forceinline__ void schedule() {
        const int num_blocks = count_blocks();
        if (num_blocks == 0 and memory.schedule().adds_gradients())
            return;
        wait_for_free_run();
        write_item(num_blocks);
        __syncwarp();
        if (num_blocks == 0)
            write_empty_run();
        else
            write_chunks();
    }

    // A band and the blocks of queries that see keys of the tile in it.
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
        const Range queries = keys_of_rows(band, {tile.key, tile.end_key});
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

    // Returns the number of blocks of queries of the work item.
    __device__ __forceinline__ int count_blocks() const {
        const CurrentTile& tile = memory.current_tile();
        int count = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i < tile.end_band; i += 32) {
            const Range blocks = find_run(i).blocks;
            count += blocks.end - blocks.begin;
        }
        return max(0, min(__reduce_add_sync(~0u, count), tile.blocks.end) - tile.blocks.begin);
    }

    // Returns a bit for each of 32 keys: set if some query sees the key, or if the tile does not have it.
    __device__ __forceinline__ uint32_t visible_keys(int first) const {
        const CurrentTile& tile = memory.current_tile();
        uint32_t visible = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i < tile.end_band; i += 32) {
            const ScheduledBand* band = tile.bands + i;
            visible |= low_bits(__ldg(&band->q1) - first) & ~low_bits(__ldg(&band->q0) - first);
        }
        return __reduce_or_sync(~0u, visible) | ~low_bits(tile.end_key - first);
    }

    // Writes the work item, which the barrier of its first run publishes.
    __device__ __forceinline__ void write_item(int num_blocks) const {
        CurrentTile& tile = memory.current_tile();
        BackwardWorkItem& work = memory.work_item(tile.item + 1);
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
        begin_item();
        tile.blocks.end = tile.blocks.begin + num_blocks;
        tile.chunk = tile.blocks.begin;
        tile.head = tile.first_head;
        work.num_steps = num_blocks * memory.schedule().heads_per_item;
        work.key = tile.key;
        work.end_key = tile.end_key;
        work.key_head = tile.key_head;
        work.example = tile.example;
        work.all_visible = all_visible;
        work.is_final = args.gradients.is_final(tile.example, tile.index);
    }

    // Writes the runs of the work item, chunk by chunk of its blocks, and in each head by head. If heads changed at
    // every block, the 8 heads of an item of dimension 192 would go through more than the L2 cache holds before the
    // neighbouring tile needs the same queries; if each went over the whole sequence, tiles of different lengths would
    // drift apart.
    __device__ __forceinline__ void write_chunks() {
        CurrentTile& tile = memory.current_tile();
#pragma unroll 1
        while (tile.chunk < tile.blocks.end) {
            write_chunk();
            __syncwarp();
            if (lane == 0 and ++tile.head == tile.first_head + memory.schedule().heads_per_item) {
                tile.head = tile.first_head;
                tile.chunk += memory.schedule().chunk_blocks;
            }
            __syncwarp();
        }
    }

    // Writes the runs of a chunk of one head. Where the order of sums is fixed, bands come as blocks do, from the last
    // to the first unless the tile is mirrored, as tickets.cuh explains.
    __device__ __forceinline__ void write_chunk() {
        CurrentTile& tile = memory.current_tile();
        if (lane == 0) {
            tile.band = 0;
            tile.blocks_before = 0;
        }
        __syncwarp();
#pragma unroll 1
        while (tile.band < tile.end_band - tile.first_band and tile.blocks_before < end_of_chunk()) {
            const int band = tile.band + lane;
            const bool backwards = args.deterministic and not tile.mirrored;
            write_runs(backwards ? tile.end_band - 1 - band : tile.first_band + band);
            if (lane == 0)
                tile.band += 32;
            __syncwarp();
        }
    }

    __device__ __forceinline__ int end_of_chunk() const {
        const CurrentTile& tile = memory.current_tile();
        return min(tile.chunk + memory.schedule().chunk_blocks, tile.blocks.end);
    }

    // Writes the runs of 32 bands, each found by one lane.
    __device__ __forceinline__ void write_runs(int index) {
        LaneRun found = find_run(index);
        keep_blocks_of_chunk(found.blocks);
#pragma unroll 1
        for (unsigned nonempty = __ballot_sync(~0u, not is_empty(found.blocks)); nonempty != 0;
             nonempty &= nonempty - 1) {
            wait_for_free_run();
            if (lane == __ffs(nonempty) - 1)
                write_run(found, index);
            ++num_runs;
            __syncwarp();
        }
    }

    // Keeps those blocks of each lane's band that belong to the chunk. Steps go from the last block of a band to the
    // first unless the tile is mirrored.
    __device__ __forceinline__ void keep_blocks_of_chunk(Range& blocks) const {
        CurrentTile& tile = memory.current_tile();
        const int count = blocks.end - blocks.begin;
        int behind = count;  // the blocks of the band and of those before it
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(~0u, behind, distance);
            behind += lane >= distance ? other : 0;
        }
        behind += tile.blocks_before;
        const int before = behind - count;
        __syncwarp();
        if (lane == 31)
            tile.blocks_before = behind;
        const int begin = max(tile.chunk - before, 0), end = end_of_chunk() - before;
        if (tile.mirrored)
            blocks = {blocks.begin + begin, min(blocks.end, blocks.begin + end)};
        else
            blocks = {max(blocks.begin, blocks.end - end), blocks.end - begin};
    }

    // Called by one lane.
    __device__ __forceinline__ void write_run(const LaneRun& found, int band_index) const {
        const CurrentTile& tile = memory.current_tile();
        const Band& band = found.band;
        BackwardBandRun& run = memory.band_run(num_runs);
        run.blocks = found.blocks;
        run.key_begin = band.q0 - tile.key;
        run.key_end = min(band.q1, tile.end_key) - tile.key;
        run.lower = band.lo + tile.key;
        run.upper = min(band.hi, kUnbounded - 1) + tile.key + 1;
        run.first_query = band.k0;
        run.end_query = band.k1;
        run.origin = found.origin;
        run.band = band_index;
        run.head = tile.head;
        const bool holds_keys = run.key_begin <= 0 and Config::kKeys <= run.key_end;
        // Every query of a block sees every key if the block lies between these, counted from the origin.
        const int from = max(band.k0, band.lo + tile.key + Config::kKeys - 1) - found.origin;
        const int to = min(band.k1, run.upper) - found.origin;
        run.unmasked = {ceil_div(max(from, 0), Config::kRows), holds_keys ? max(to, 0) / Config::kRows : 0};
        publish_run();
    }

    // Writes what a run has from its tile and hands it to the producer. Called by one lane.
    __device__ __forceinline__ void publish_run() const {
        CurrentTile& tile = memory.current_tile();
        BackwardBandRun& run = memory.band_run(num_runs);
        run.item = tile.item;
        run.first = tile.has_no_run;
        tile.has_no_run = false;
        run.mirrored = tile.mirrored;
        run.key = tile.key;
        run.key_head = tile.key_head;
        run.example = tile.example;
        run.mask = tile.mask;
        run.tile = tile.index;
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
