#pragma once

#include "csrc/attention/sm90/forward_arguments.cuh"
#include "csrc/attention/sm90/forward_config.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/tma.cuh"
#include "csrc/mask/band.h"

// The producer warp: takes tiles, finds the keys their rows see, and streams them through shared memory.
//
// Every band of a tile becomes a run of blocks of keys, right to left, ending where the last key is seen. The
// leftmost block is moved right to begin at the first key that is seen, so that no block holds a key which the tile
// does not see: NaN there must not reach the product with the values. Only a run shorter than one block may hold
// foreign keys behind its end; their values are overwritten with zeros.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardProducer {
    ForwardMemory<Config> memory;
    const ForwardTensorMaps& maps;
    const ForwardArguments& args;
    int lane;
    bool wide = true;     // the blocks of the present tile
    unsigned num_blocks = 0;  // produced so far
    bool pending = false;     // whether the values of the newest block are still to be loaded
    int num_cleaned = 0;      // those whose values were cleaned

    __device__ __forceinline__ void run() {
        int turn = 0, item = blockIdx.x;
#pragma unroll 1
        while (item < args.schedule.num_items) {
            produce(item_at(args.schedule, item), turn++);
            item = next_item();
        }
        announce(turn, {.num_blocks = -1}, 0);
    }

private:
    __device__ __forceinline__ int next_item() const {
        int taken = args.schedule.num_items;
        if (lane == 0 and gridDim.x < args.schedule.num_items)
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(taken) : "l"(args.counter) : "memory");
        return gridDim.x + __shfl_sync(~0u, taken, 0);
    }

    // Once the queries of the last tile are no longer needed. The caller loads `q_bytes` of queries.
    __device__ __forceinline__ void announce(int turn, TileMessage message, int q_bytes) const {
        memory.q_empty().wait((turn & 1) ^ 1);
        if (lane == 0) {
            memory.tile_message(turn) = message;
            memory.q_full().arrive_and_expect(q_bytes);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void produce(const ForwardItem& item, int turn) {
        const PlannedTile tile = args.tiles[static_cast<int64_t>(item.plan) * args.schedule.num_tiles + item.rank];
        const PlannedBand* bands = args.bands + static_cast<int64_t>(item.plan) * args.capacity;
        const int example = item.plan + item.key_head / args.kv_heads, key_head = item.key_head % args.kv_heads;
        const int row = tile.tile * Config::kRows, head = key_head * args.schedule.group + item.head_in_group;
        const Range rows{row, min(row + Config::kRows, args.q_len)};
        const TileMessage message{choose_blocks(bands, tile, rows), row, head, example, key_head, wide};
        if (message.num_blocks == 0)
            return announce(turn, message, 0);
        announce(turn, message, Config::kQBytes);
        if (lane == 0)
            load<Config::kDim>(memory.q(), maps.q, Config::kRows, {0, head, row, example}, memory.q_full());
#pragma unroll 1
        for (int first = tile.first_band; first < tile.end_band; first += 32) {
            const bool seen = not is_empty(keys_seen(bands, first + lane, tile.end_band, rows));
            for (unsigned live = __ballot_sync(~0u, seen); live != 0; live &= live - 1)
                produce_run(band_at(bands, first + __ffs(live) - 1), rows, turn);
        }
        if (lane == 0)
            load_pending_values(num_blocks - 1, turn);
    }

    // Sets `wide`; returns the number of blocks.
    __device__ __forceinline__ int choose_blocks(const PlannedBand* bands, const PlannedTile& tile, Range rows) {
        int num_wide = 0, num_narrow = 0;
#pragma unroll 1
        for (int i = tile.first_band + lane; i - lane < tile.end_band; i += 32) {
            const Range keys = keys_seen(bands, i, tile.end_band, rows);
            num_wide += ceil_div(keys.end - keys.begin, Config::kWideKeys);
            if constexpr (Config::kTwoWidths)
                num_narrow += ceil_div(keys.end - keys.begin, Config::kNarrowKeys);
        }
        num_wide = __reduce_add_sync(~0u, num_wide);
        if constexpr (not Config::kTwoWidths)
            return num_wide;
        // Measured: a key of a narrow block takes 17/16 of the time that it takes in a wide one, and beginning and end
        // of a tile together about two blocks.
        num_narrow = __reduce_add_sync(~0u, num_narrow);
        wide = (num_wide + 2.f) * (16 * Config::kWideKeys) <= (num_narrow + 2.f) * (17 * Config::kNarrowKeys);
        return wide ? num_wide : num_narrow;
    }

    __device__ __forceinline__ int block_keys() const {
        return Config::kTwoWidths and not wide ? Config::kNarrowKeys : Config::kWideKeys;
    }

    // The keys that the rows see in a band; none behind the last band.
    __device__ __forceinline__ static Range keys_seen(const PlannedBand* bands, int index, int end, Range rows) {
        if (index >= end)
            return {0, 0};
        const Range keys = keys_of_rows(band_at(bands, index), rows);
        return is_empty(keys) ? Range{0, 0} : keys;
    }

    __device__ __forceinline__ static Band band_at(const PlannedBand* bands, int index) {
        const int4* words = reinterpret_cast<const int4*>(bands + index);
        const int4 ranges = __ldg(words);
        const int2 limits = __ldg(reinterpret_cast<const int2*>(words + 1));
        return {ranges.x, ranges.y, ranges.z, ranges.w, limits.x, limits.y};
    }

    __device__ __forceinline__ void produce_run(const Band& band, Range rows, int turn) {
        const Range keys = keys_of_rows(band, rows);
        if (keys.end - keys.begin < block_keys() and keys.end < args.kv_len)
            return produce_cleaned(band, rows, keys, turn);
        if (lane == 0)
            produce_blocks(band, rows, keys, turn);
        const int size = keys.end - keys.begin;
        num_blocks += wide ? ceil_div(size, Config::kWideKeys) : ceil_div(size, Config::kNarrowKeys);
        __syncwarp();
    }

    __device__ __forceinline__ void produce_blocks(const Band& band, Range rows, Range keys, int turn) {
        unsigned block = num_blocks;
#pragma unroll 1
        for (int end = keys.end; end > keys.begin; end -= block_keys(), ++block) {
            load_keys(block, message_for(band, rows, {max(end - block_keys(), keys.begin), end}), turn);
            load_pending_values(block - 1, turn);
            pending = true;
        }
    }

    __device__ __forceinline__ void produce_cleaned(const Band& band, Range rows, Range keys, int turn) {
        if (lane == 0) {
            load_keys(num_blocks, message_for(band, rows, keys), turn);
            load_pending_values(num_blocks - 1, turn);
            load_values(num_blocks, turn, memory.v_loaded());
        }
        clean_values(num_blocks++, keys.end - keys.begin);
    }

    // Values are loaded after the keys of the next block, which are needed first and whose place is free earlier.
    __device__ __forceinline__ void load_pending_values(unsigned block, int turn) {
        if (pending)
            load_values(block, turn, memory.v_full(block));
        pending = false;
    }

    __device__ __forceinline__ void load_keys(unsigned block, const BlockMessage& message, int turn) const {
        memory.k_empty(block).wait(memory.parity(block) ^ 1);
        memory.block_message(block) = message;
        memory.k_full(block).arrive_and_expect(block_keys() * panels(Config::kDim) * kPanelRowBytes);
        load<Config::kDim>(memory.k(block), maps.k[wide], block_keys(), coordinates(block, turn),
                           memory.k_full(block));
    }

    __device__ __forceinline__ void load_values(unsigned block, int turn, Mbarrier arrived) const {
        memory.v_empty(block).wait(memory.parity(block) ^ 1);
        arrived.arrive_and_expect(block_keys() * panels(Config::kVDim) * kPanelRowBytes);
        load<Config::kVDim>(memory.v(block), maps.v[wide], block_keys(), coordinates(block, turn), arrived);
    }

    // Of a block of keys or values; read back from the messages, since registers are scarce.
    __device__ __forceinline__ Coordinates coordinates(unsigned block, int turn) const {
        const TileMessage& tile = memory.tile_message(turn);
        return {0, tile.key_head, memory.block_message(block).first_key, tile.example};
    }

    // By the whole warp: waits for the values of a short run, and puts zeros behind its last row.
    __device__ __forceinline__ void clean_values(unsigned block, int first_row) {
        constexpr int kVectors = kPanelRowBytes / 16;
        __syncwarp();
        memory.v_loaded().wait(num_cleaned++ & 1);
        for (int i = first_row * kVectors + lane; i < block_keys() * kVectors; i += 32) {
#pragma unroll
            for (int panel = 0; panel < panels(Config::kVDim); ++panel)
                store_zeros(memory.v(block) + panel * block_keys() * kPanelRowBytes + i * 16);
        }
        fence_shared_for_async();
        __syncwarp();
        if (lane == 0)
            memory.v_full(block).arrive();
    }

    __device__ __forceinline__ static void store_zeros(SharedAddress to) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }

    // keys: those the block stands for; they begin at its column 0.
    __device__ __forceinline__ BlockMessage message_for(const Band& band, Range rows, Range keys) const {
        // Limits that bind no row are cut back to where sums cannot overflow.
        const int last_row = rows.begin + Config::kRows - 1;
        const int lo = max(band.lo, keys.begin - last_row), hi = min(band.hi, keys.end - 1 - rows.begin);
        const bool open = keys.end - keys.begin == block_keys() and covers(band, rows, keys);
        return {.row_begin = band.q0 - rows.begin,
                .row_end = band.q1 - rows.begin,
                .lower = lo + rows.begin - keys.begin,
                .upper = hi + rows.begin - keys.begin + 1,
                .num_columns = keys.end - keys.begin,
                .masked = not open,
                .first_key = keys.begin};
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
