#pragma once

#include "csrc/attention/sm90/forward/arguments.cuh"
#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/bits.cuh"
#include "csrc/common/sm90/system_memory.cuh"

// The scheduler warp claims work items and finds, for each band of the mask, the run of keys that the rows see. It
// works ahead of the producer, which then waits neither for the counter of work items nor for the bands.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardScheduler {
    ForwardMemory<Config> memory;
    const ForwardArguments& args;
    unsigned num_runs = 0;  // written so far

    __device__ __forceinline__ void run() {
        begin(args.first);
        int item = 0, index = args.claims_first ? claim_index() : blockIdx.x;
#pragma unroll 1
        for (;; index = claim_index()) {
            if (index < memory.work().schedule.num_items) {
                note_whether_to_ask(index);
                if (is_wanted(index))
                    schedule(item_at(memory.work().schedule, index), item);
                else
                    skip_section(index);
                if (memory.work().asks_for_parts)
                    begin_next();
            } else if (not begin_next()) {
                break;
            }
        }
        if (args.drained != nullptr and lane_index() == 0)
            store_release(args.drained, 1);
        write_item(item, {.num_blocks = -1});
        write_empty_run(item, true);
    }

private:
    // Parts that have arrived come before further sections of the first work, so that the last section of all has many
    // work items, the shortest ones last, which all CTAs share evenly. So CTAs ask for them behind the first work items
    // of a section, as many as there are CTAs. It is noted in shared memory, since the warp has no register left for it
    // while it schedules the work item.
    __device__ __forceinline__ void note_whether_to_ask(int index) const {
        ForwardWork& work = memory.work();
        if (lane_index() == 0)
            work.asks_for_parts = args.first.part < 0 and index % work.schedule.per_section < args.num_ctas;
        __syncwarp();
    }

    // Begins with the first part that has arrived and has work items left, otherwise with the first work, and returns
    // whether there is one. Where another CTA of the launch has ended, this one does not go on: the next launch has as
    // many CTAs, and with those that went on they would take the SMs that are left to transfers.
    __device__ __forceinline__ bool begin_next() const {
        if (args.drained != nullptr and load_acquire(args.drained) != 0)
            return false;
        const unsigned parts = __ballot_sync(~0u, has_part_left(lane_index()));
        if (parts != 0)
            begin_part(__ffs(parts) - 1);
        else if (args.first.part < 0 and has_items_left(args.first, 0))
            begin(args.first);
        else
            return false;
        return true;
    }

    // Returns whether there may be work items of a part that no CTA has claimed or had from the beginning. So a CTA
    // need not claim from each part in turn to find out that others have done them all.
    __device__ __forceinline__ static bool has_items_left(const ForwardWork& work, int part) {
        return work.claimed_items > 0 and
               *static_cast<const volatile int*>(work.counter + part) < work.claimed_items;
    }

    // Returns whether a part has arrived, and may have work items left.
    __device__ __forceinline__ bool has_part_left(int part) const {
        if (part >= args.num_parts)
            return false;
        if (args.num_arrived != nullptr and load_acquire(args.num_arrived) <= static_cast<unsigned>(part))
            return false;
        fence_global_for_async();  // for the producer's loads
        return has_items_left(args.parts, part);
    }

    // Each lane copies a word: in one lane, all of them would take registers that the warp does not have.
    __device__ __forceinline__ void begin(const ForwardWork& work) const {
        constexpr int kWords = sizeof(ForwardWork) / sizeof(int);
        static_assert(kWords <= 32 and sizeof(ForwardWork) % sizeof(int) == 0);
        __syncwarp();
        if (lane_index() < kWords)
            reinterpret_cast<int*>(&memory.work())[lane_index()] = reinterpret_cast<const int*>(&work)[lane_index()];
        __syncwarp();
    }

    __device__ __forceinline__ void begin_part(int part) const {
        begin(args.parts);
        if (lane_index() == 0) {
            ForwardWork& work = memory.work();
            work.part = part;
            work.counter += part;
            work.keys.first_key_head = part * work.kv_heads;
            work.first_head = work.keys.first_key_head * work.schedule.group;
            work.keys.first_example = part * args.batch;
        }
        __syncwarp();
    }

    // The run of keys in one of 32 bands, each in one lane. The remainders of two neighbours may share a block.
    struct LaneRun {
        Band band;             // with its visible keys only
        int packed_keys;       // as in ForwardBandRun
        bool has_packed_tail;  // as in ForwardBandRun
        unsigned nonempty;     // bits of the lanes with keys

        __device__ __forceinline__ int num_blocks() const {
            return ceil_div(band.k1 - band.k0 - packed_keys, Config::kKeys);
        }
    };

    // A CTA that claims a work item long before it can begin with it keeps the item from other CTAs, and may end late.
    // So it claims the next one when the producer begins with this one or, if this one has more blocks than these, when
    // all its keys are on their way.
    static constexpr int kManyBlocks = 32;

    // Waits until the producer has fewer than `limit` runs left.
    __device__ __forceinline__ void wait_for_producer(unsigned limit) const {
        const unsigned run = num_runs - min(limit, ForwardMemory<Config>::kRuns);
        memory.run_empty(run).wait(memory.run_parity(run));
    }

    __device__ __forceinline__ static int first_claimed(const ForwardWork& work) {
        return work.schedule.num_items - work.claimed_items;
    }

    __device__ __forceinline__ int claim_index() const {
        const ForwardWork& work = memory.work();
        int claimed = work.schedule.num_items;
        if (lane_index() == 0 and work.claimed_items > 0)
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(claimed) : "l"(work.counter) : "memory");
        return first_claimed(work) + __shfl_sync(~0u, claimed, 0);
    }

    // Returns whether the tile of a work item is to be computed.
    __device__ __forceinline__ bool is_wanted(int index) const {
        const ForwardWork& work = memory.work();
        if (work.subset == Tiles::kAll)
            return true;
        const int rank = item_at(work.schedule, index).rank;
        return work.tiles[rank * work.tile_step].sees_received() == (work.subset == Tiles::kSeeReceived);
    }

    // Leaves out the other work items of a section, since tiles that are not wanted are its last ones. There is one
    // mask then.
    __device__ __forceinline__ void skip_section(int index) const {
        const ForwardWork& work = memory.work();
        const int end = (index / work.schedule.per_section + 1) * work.schedule.per_section - first_claimed(work);
        if (lane_index() == 0)
            asm volatile("red.global.max.s32 [%0], %1;" ::"l"(work.counter), "r"(end) : "memory");
    }

    // Writes the work item at these coordinates and its runs, unless it lies behind the last position.
    __device__ __forceinline__ void schedule(const ForwardItem& coordinates, int& item) {
        const ForwardWork& work = memory.work();
        const auto [mask, rank, item_head, head_in_group, slice] = coordinates;
        const ScheduledTile tile =
            work.tiles[static_cast<int64_t>(mask) * work.schedule.num_tiles + rank * work.tile_step];
        const ScheduledBand* bands = args.bands + static_cast<int64_t>(mask) * args.capacity;
        // One mask may serve all examples, whose heads are then counted on, or each example has a mask of its own.
        const int example = mask + item_head / work.kv_heads, key_head = item_head % work.kv_heads;
        const int num_rows = Config::kRows >> work.schedule.pack_shift;
        const int row = tile.index() * Config::kRows + slice * num_rows;
        const int head = work.first_head + key_head * work.schedule.group + head_in_group;
        if (row >= args.q_len)
            return;
        const Range rows{row, min(row + num_rows, args.q_len)};
        const int num_blocks = count_blocks(bands, tile, rows);
        write_item(item, {num_blocks, row, head, example, key_head, num_runs});
        if (num_blocks == 0)
            write_empty_run(item, false);
        int left = num_blocks;
#pragma unroll 1
        for (int i = tile.first_band; i < tile.end_band; i += 32) {
            const LaneRun run = find_run(bands, i, tile.end_band, rows);
            for (unsigned nonempty = run.nonempty; nonempty != 0; nonempty &= nonempty - 1) {
                const int writer = __ffs(nonempty) - 1;
                left -= __shfl_sync(~0u, run.num_blocks(), writer);
                wait_for_free_run();
                if (lane_index() == writer)
                    write_run(run, item, left);
                ++num_runs;
            }
        }
        const ForwardWorkItem& written = memory.work_item(item++);
        wait_for_producer(written.num_blocks > kManyBlocks ? 1 : num_runs - written.first_run + 1);
    }

    // Called by one lane.
    __device__ __forceinline__ void write_run(const LaneRun& run, int item, int left) const {
        const ForwardWorkItem& work = memory.work_item(item);
        ForwardBandRun& to = memory.band_run(num_runs);
        const KeyPlaces& places = memory.work().keys;
        to.heads[0] = {places.first_key_head + work.key_head, work.example};
        to.heads[1] = {work.key_head, places.first_example + work.example};
        to.split_key = places.split_key;
        const int last_row = min(Config::kRows >> args.first.schedule.pack_shift, args.q_len - work.row) - 1;
        to.band = TileBand::make(run.band, work.row, last_row);
        to.keys = {run.band.k0, run.band.k1};
        to.item = item;
        to.first = left + run.num_blocks() == work.num_blocks;
        to.last = left == 0;
        to.stop = false;
        to.has_packed_tail = run.has_packed_tail;
        to.packed_keys = run.packed_keys;
        memory.run_full(num_runs).arrive();
    }

    __device__ __forceinline__ int count_blocks(const ScheduledBand* bands, const ScheduledTile& tile,
                                                Range rows) const {
        int count = 0;
#pragma unroll 1
        for (int i = tile.first_band; i < tile.end_band; i += 32)
            count += find_run(bands, i, tile.end_band, rows).num_blocks();
        return __reduce_add_sync(~0u, count);
    }

    // Returns to each lane the run of one of 32 bands. Called by the whole warp.
    __device__ __forceinline__ LaneRun find_run(const ScheduledBand* bands, int first, int end, Range rows) const {
        const int lane = lane_index();
        LaneRun run{visible_part(bands, first + lane, end, rows), 0};
        const int size = run.band.k1 - run.band.k0;
        run.nonempty = __ballot_sync(~0u, size > 0);
        const unsigned before = run.nonempty & low_bits(lane), after = run.nonempty & ~low_bits(lane + 1);
        const int next_size = __shfl_sync(~0u, size, max(__ffs(after) - 1, 0));
        run.has_packed_tail =
            size > 0 and after != 0 and __popc(before) % 2 == 0 and fit_in_one_block(size, next_size);
        const unsigned with_tail = __ballot_sync(~0u, run.has_packed_tail);
        if (size > 0 and before != 0 and (with_tail >> (31 - __clz(before)) & 1))
            run.packed_keys = size % Config::kKeys;
        return run;
    }

    // Returns true if one block can hold the remainders of two runs, each in whole parts: first that of the second run,
    // then that of the first. Parts may begin with keys that do not count there, but the tile has to see these keys
    // too: hence the least sizes.
    __device__ __forceinline__ static bool fit_in_one_block(int size, int next_size) {
        const int over = size % Config::kKeys, next_over = next_size % Config::kKeys;
        return size >= Config::kKeys and next_size >= Config::kKeys and over != 0 and next_over != 0 and
               ceil_div(over, kPartKeys) * kPartKeys + next_over <= Config::kKeys;
    }

    // Returns the band with only those keys that the rows see, and an empty one behind the last band.
    __device__ __forceinline__ Band visible_part(const ScheduledBand* bands, int index, int end, Range rows) const {
        if (index >= end)
            return {};
        const int4* words = reinterpret_cast<const int4*>(bands + index);
        const int4 ranges = __ldg(words);
        const int2 limits = __ldg(reinterpret_cast<const int2*>(words + 1));
        Band band{ranges.x, ranges.y, ranges.z, ranges.w, limits.x, limits.y};
        const Range keys = keys_of_rows(band, rows);
        band.k0 = max(keys.begin, args.key_begin);
        band.k1 = max(band.k0, min(keys.end, args.key_end));
        return band;
    }

    // Writes a work item once there is room for its first run, whose barrier publishes both.
    __device__ __forceinline__ void write_item(int item, const ForwardWorkItem& work) const {
        wait_for_free_run();
        if (lane_index() == 0)
            memory.work_item(item) = work;
        __syncwarp();
    }

    // Writes the only run of a work item without blocks, or the one that stops the producer.
    __device__ __forceinline__ void write_empty_run(int item, bool stop) {
        wait_for_free_run();
        if (lane_index() == 0) {
            memory.band_run(num_runs) = {.item = item, .first = true, .last = true, .stop = stop};
            memory.run_full(num_runs).arrive();
        }
        ++num_runs;
    }

    __device__ __forceinline__ void wait_for_free_run() const {
        memory.run_empty(num_runs).wait(memory.run_parity(num_runs) ^ 1);
    }
};

}  // namespace jaxmagi::sm90
