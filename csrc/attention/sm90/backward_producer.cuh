#pragma once

#include "csrc/attention/sm90/backward_arguments.cuh"
#include "csrc/attention/sm90/backward_config.cuh"
#include "csrc/attention/sm90/forward_softmax.cuh"
#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/tma.cuh"

// The producer warp: takes tiles of keys, finds the blocks of queries that see them, and streams those through shared memory.
//
// Bands are those of a plan by keys, and so transposed: their rows are keys, their columns queries.

namespace jaxmagi::sm90 {

// A band as the keys of a tile have it, counted from the first one.
struct TileBand {
    Band band;
    Range keys, queries;  // those of the tile, also where they do not exist; those that see any of them

    // Of queries from first_query on.
    template <typename Config> __device__ __forceinline__ StepMessage step(int first_query) const {
        const Range block{first_query, first_query + Config::kRows};
        const int end = band.k1 - first_query;
        return {.key_begin = band.q0 - keys.begin,
                .key_end = band.q1 - keys.begin,
                // Bounded, so that sums do not overflow.
                .lower = max(band.lo + keys.begin - first_query, -kUnbounded),
                .upper = min(min(band.hi, kUnbounded - 1) + keys.begin + 1 - first_query, end),
                .first_column = band.k0 - first_query,
                .end_column = end,
                .masked = not covers(band, keys, block)};
    }
};

template <typename Config> struct BackwardProducer {
    BackwardMemory<Config> memory;
    const BackwardTensorMaps& maps;
    const BackwardArguments& args;
    int lane;
    unsigned step = 0;  // the next one

    __device__ __forceinline__ void run() {
        int turn = 0;
#pragma unroll 1
        for (int item = take_item(); item < args.schedule.num_items; item = take_item())
            produce_tile(item_at(args.schedule, item), turn++);
        announce({.num_steps = -1}, turn);
        if (elect_lane())
            memory.kv_full().arrive();
    }

private:
    struct Tile {
        const PlannedBand* bands;
        int first_band, end_band, index;
        Range keys;  // also those that do not exist
        int plan, example, key_head;
    };

    // Whatever a tile may wait for, where sums have an order, was taken before it, by a CTA that runs.
    __device__ __forceinline__ int take_item() const {
        int taken = 0;
        if (lane == 0)
            asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(taken) : "l"(args.workspace.counter) : "memory");
        return __shfl_sync(~0u, taken, 0);
    }

    __device__ __forceinline__ Tile find_tile(const BackwardItem& item) const {
        const int64_t first = int64_t{item.plan} * args.schedule.num_tiles;
        const int rank =
            args.deterministic ? args.workspace.places[first + args.schedule.num_tiles - 1 - item.rank] : item.rank;
        const PlannedTile planned = args.tiles[first + rank];
        const int key = planned.tile * Config::kKeys;
        return {.bands = args.bands + int64_t{item.plan} * args.capacity,
                .first_band = planned.first_band,
                .end_band = planned.end_band,
                .index = planned.tile,
                .keys = {key, key + Config::kKeys},
                .plan = item.plan,
                .example = item.plan + item.key_head / args.kv_heads,
                .key_head = item.key_head % args.kv_heads};
    }

    __device__ __forceinline__ void produce_tile(const BackwardItem& item, int turn) {
        const Tile tile = find_tile(item);
        const KeyTileMessage message = survey(tile);
        announce(message, turn);
        if (elect_lane()) {
            if (message.num_steps > 0)
                load_keys(tile);
            else
                memory.kv_full().arrive();
        }
        __syncwarp();
        if (message.num_steps == 0)
            return;
#pragma unroll 1
        for (int head = 0; head < args.schedule.group; ++head)
            produce_head(tile, tile.key_head * args.schedule.group + head);
    }

    __device__ __forceinline__ static TileBand band_at(const Tile& tile, int index) {
        if (index >= tile.end_band)
            return {};
        const int4* words = reinterpret_cast<const int4*>(tile.bands + index);
        const int4 ranges = __ldg(words);
        const int2 limits = __ldg(reinterpret_cast<const int2*>(words + 1));
        const Band band{ranges.x, ranges.y, ranges.z, ranges.w, limits.x, limits.y};
        return {band, tile.keys, keys_of_rows(band, tile.keys)};
    }

    __device__ __forceinline__ static Range blocks_of(Range queries) {
        return {queries.begin / Config::kRows, ceil_div(queries.end, Config::kRows)};
    }

    // Which keys are seen, and by how many blocks.
    __device__ __forceinline__ KeyTileMessage survey(const Tile& tile) const {
        KeyTileMessage message{.key = tile.keys.begin, .key_head = tile.key_head, .example = tile.example};
        int num_blocks = 0;
#pragma unroll 1
        for (int i = tile.first_band; i < tile.end_band; i += 32) {
            const TileBand found = band_at(tile, i + lane);
            const Range blocks = is_empty(found.queries) ? Range{0, 0} : blocks_of(found.queries);
            num_blocks += __reduce_add_sync(~0u, blocks.end - blocks.begin);
            for (int w = 0; w < Config::kKeys / 32; ++w)
                message.seen[w] |= __reduce_or_sync(~0u, key_bits(found.band, tile.keys.begin + 32 * w));
        }
        message.num_steps = num_blocks * args.schedule.group;
        message.all_seen = true;
        const Band missing{.q0 = args.kv_len, .q1 = kUnbounded};
        for (int w = 0; w < Config::kKeys / 32; ++w) {
            message.seen[w] |= key_bits(missing, tile.keys.begin + 32 * w);
            message.all_seen = message.all_seen and message.seen[w] == ~0u;
        }
        return message;
    }

    // Those of 32 keys that the band holds.
    __device__ __forceinline__ static uint32_t key_bits(const Band& band, int first) {
        return low_bits(band.q1 - first) & ~low_bits(band.q0 - first);
    }

    // When the tile before this one is done with.
    __device__ __forceinline__ void announce(const KeyTileMessage& message, int turn) const {
        memory.kv_empty().wait((turn & 1) ^ 1);
        if (elect_lane())
            memory.tile_message(turn) = message;
    }

    __device__ __forceinline__ void load_keys(const Tile& tile) const {
        const Coordinates at{0, tile.key_head, tile.keys.begin, tile.example};
        memory.kv_full().arrive_and_expect(Config::kKBytes + Config::kVBytes);
        load<Config::kDim>(memory.k(), maps.k, Config::kKeys, at, memory.kv_full());
        load<Config::kVDim>(memory.v(), maps.v, Config::kKeys, at, memory.kv_full());
    }

    __device__ __forceinline__ void produce_head(const Tile& tile, int head) {
#pragma unroll 1
        for (int i = tile.first_band; i < tile.end_band; i += 32) {
            const TileBand own = band_at(tile, i + lane);
#pragma unroll 1
            for (unsigned live = __ballot_sync(~0u, not is_empty(own.queries)); live != 0; live &= live - 1) {
                const int owner = __ffs(live) - 1;
                const TileBand found = broadcast(own, owner);
                const Range blocks = blocks_of(found.queries);
                if (elect_lane())
                    produce_blocks(tile, found, blocks, head, i + owner);
                __syncwarp();
                step += blocks.end - blocks.begin;
            }
        }
    }

    __device__ __forceinline__ static TileBand broadcast(const TileBand& own, int owner) {
        const auto from = [&](int value) { return __shfl_sync(~0u, value, owner); };
        return {{from(own.band.q0), from(own.band.q1), from(own.band.k0), from(own.band.k1), from(own.band.lo),
                 from(own.band.hi)},
                own.keys,
                {from(own.queries.begin), from(own.queries.end)}};
    }

    __device__ __forceinline__ void produce_blocks(const Tile& tile, const TileBand& band, Range blocks, int head,
                                                   int band_index) const {
        const int first_block = (tile.example * args.heads + head) * args.workspace.blocks_per_head;
        unsigned at = step;
#pragma unroll 1
        for (int block = blocks.begin; block < blocks.end; ++block, ++at) {
            StepMessage message = band.step<Config>(block * Config::kRows);
            message.row_block = first_block + block * Config::kRowBlocks;
            message.plan = tile.plan;
            message.block = block * Config::kRowBlocks;
            message.band = band_index;
            message.tile = tile.index;
            const Coordinates from{0, head, block * Config::kRows, tile.example};
            load_queries(at, message, from);
            load_dout(at, from);
        }
    }

    __device__ __forceinline__ void load_queries(unsigned at, const StepMessage& message,
                                                 const Coordinates& from) const {
        const Mbarrier full = memory.q_full(at);
        memory.q_empty(at).wait(memory.q_parity(at) ^ 1);
        memory.step_message(at) = message;
        full.arrive_and_expect(Config::kQBytes + Config::kRowsBytes);
        load<Config::kDim>(memory.q(at), maps.q, Config::kRows, from, full);
        bulk_load(shared_address(memory.rows(at)), args.workspace.rows + message.row_block, Config::kRowsBytes, full);
    }

    __device__ __forceinline__ void load_dout(unsigned at, const Coordinates& from) const {
        memory.dout_empty(at).wait(memory.dout_parity(at) ^ 1);
        memory.dout_full(at).arrive_and_expect(Config::kDoutBytes);
        load<Config::kVDim>(memory.dout(at), maps.dout, Config::kRows, from, memory.dout_full(at));
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
