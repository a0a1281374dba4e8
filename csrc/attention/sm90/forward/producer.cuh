#pragma once

#include "csrc/attention/sm90/forward/arguments.cuh"
#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/tma.cuh"

// The producer warp: streams queries, keys and values through shared memory.
//
// The scheduler's runs of keys become blocks, right to left, from the last key that is seen to the first. What is left
// over goes to the first block, which is masked most of the time: of its keys those do not count which the next block
// has too. So no block holds a key which the tile does not see: NaN there must not reach the product with the values.
// Only a run shorter than one block may hold foreign keys behind its end; their values are overwritten with zeros.
// Where two runs of a tile leave over no more than a block together, the first block of the first run takes what is
// left over of the second one, its guests, in place of the keys that do not count there.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardProducer {
    ForwardMemory<Config> memory;
    const ForwardTensorMaps& maps;
    const ForwardArguments& args;
    unsigned num_blocks = 0;  // produced so far
    int pending_key = kNone;  // first key of the newest block, if its values are still to be loaded

    static constexpr int kNone = -1;

    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (unsigned run = 0;; ++run) {
            memory.run_full(run).wait(memory.run_parity(run));
            const RunMessage& message = memory.run_message(run);
            if (is_empty(message.keys))
                announce_empty(message.turn);
            else
                produce(run);
            if (message.stop)
                return;
            const bool last = message.last;
            const KeyHead head = message.head;
            __syncwarp();
            if (elect_lane())
                memory.run_empty(opaque(run)).arrive();
            if (last)
                load_pending_values(head, memory.v_full(num_blocks - 1));
        }
    }

private:
    __device__ __forceinline__ void announce_empty(int turn) const {
        memory.q_empty().wait((turn & 1) ^ 1);
        if (elect_lane())
            memory.q_full().arrive();
    }

    __device__ __forceinline__ void produce(unsigned run) {
        if (elect_lane())
            produce_blocks(run);
        __syncwarp();
        const RunMessage& message = memory.run_message(run);
        const int size = message.keys.end - message.keys.begin;
        num_blocks += ceil_div(size - message.given, Config::kKeys);
        pending_key = message.keys.begin;
        if (size < Config::kKeys and message.keys.end < args.kv_len)
            load_and_clean_values(run, size);
    }

    // From right to left. The first keys of a tile are loaded before its queries, whose place becomes free later;
    // values after the keys of the next block, which are needed first. Warps of consumers share the issue slots: every
    // instruction in this loop makes them wait.
    __device__ __forceinline__ void produce_blocks(unsigned run) const {
        constexpr int kStep = Config::kKeys;
        const RunMessage& message = memory.run_message(run);
        const TileBand band = message.band;
        const KeyHead head = message.head;
        const int first_key = message.keys.begin, end = message.keys.end - message.given;
        const int over = (end - first_key) % kStep;
        const int begin = over == 0 or end - first_key < kStep ? 0 : kStep - over;  // the first column that counts
        int key = max(end - kStep, first_key), guests = message.has_guest ? begin / kPartKeys * kPartKeys : 0;
        unsigned block = num_blocks;
        memory.k_empty(block).wait(memory.parity(block) ^ 1);
        memory.block_message(block) = band.block(key, begin, min(kStep, end - key), kStep);
        if (guests > 0)
            load_keys_with_guests(block, run, guests);
        else
            load_keys(block, key, head);
        if (message.first)
            load_queries(message.turn);
        if (pending_key != kNone)
            load_values(block - 1, pending_key, head, memory.v_full(block - 1));
        int previous_key = key;
#pragma unroll 1
        for (key += begin - kStep; key >= first_key; key -= kStep) {
            ++block;
            memory.k_empty(block).wait(memory.parity(block) ^ 1);
            memory.block_message(block) = band.block(key, 0, kStep, kStep);
            load_keys(block, key, head);
            if (guests > 0)
                load_values_with_guests(block - 1, run, guests);
            else
                load_values(block - 1, previous_key, head, memory.v_full(block - 1));
            guests = 0;
            previous_key = key;
        }
    }

    __device__ __forceinline__ void load_keys(unsigned block, int key, const KeyHead& of) const {
        memory.k_full(block).arrive_and_expect(Config::kKBytes);
        load<Config::kDim>(memory.k(block), maps.k, Config::kKeys, {0, of.head, key, of.example},
                           memory.k_full(block));
    }

    __device__ __forceinline__ void load_values(unsigned block, int key, const KeyHead& of, Mbarrier arrived) const {
        memory.v_empty(block).wait(memory.parity(block) ^ 1);
        arrived.arrive_and_expect(Config::kVBytes);
        load<Config::kVDim>(memory.v(block), maps.v, Config::kKeys, {0, of.head, key, of.example}, arrived);
    }

    // In the first `guests` columns are the last keys of the next run, of which those count that are left over.
    __device__ __forceinline__ void load_keys_with_guests(unsigned block, unsigned run, int guests) const {
        memory.run_full(run + 1).wait(memory.run_parity(run + 1));
        const RunMessage& next = memory.run_message(run + 1);
        memory.guest_message(block) =
            next.band.block(next.keys.end - guests, guests - next.given, guests, Config::kKeys);
        memory.block_message(block).has_guest = true;
        memory.k_full(block).arrive_and_expect(Config::kKBytes);
        load_parts<Config::kDim>(memory.k(block), maps.k_part, run, guests, memory.k_full(block));
    }

    __device__ __forceinline__ void load_values_with_guests(unsigned block, unsigned run, int guests) const {
        memory.v_empty(block).wait(memory.parity(block) ^ 1);
        memory.v_full(block).arrive_and_expect(Config::kVBytes);
        load_parts<Config::kVDim>(memory.v(block), maps.v_part, run, guests, memory.v_full(block));
    }

    template <int kColumns>
    __device__ __forceinline__ void load_parts(SharedAddress to, const CUtensorMap& map, unsigned run, int guests,
                                               Mbarrier arrived) const {
        const RunMessage& message = memory.run_message(run);
        const int guest_key = memory.run_message(run + 1).keys.end - guests;
        const int key = message.keys.end - message.given - Config::kKeys;
#pragma unroll 1
        for (int i = 0; i < Config::kKeys; i += kPartKeys)
            load<kColumns>(to + i * kPanelRowBytes, map, Config::kKeys,
                           {0, message.head.head, i + (i < guests ? guest_key : key), message.head.example}, arrived);
    }

    __device__ __forceinline__ void load_queries(int turn) const {
        memory.q_empty().wait((turn & 1) ^ 1);
        const TileMessage& tile = memory.tile_message(turn);
        memory.q_full().arrive_and_expect(Config::kQBytes);
        load<Config::kDim>(memory.q(), maps.q, Config::kRows, {0, tile.head, tile.row, tile.example},
                           memory.q_full());
    }

    // By the whole warp.
    __device__ __forceinline__ void load_pending_values(const KeyHead& head, Mbarrier arrived) {
        if (pending_key != kNone and elect_lane())
            load_values(num_blocks - 1, pending_key, head, arrived);
        pending_key = kNone;
    }

    // Loads the values of a short run, its newest block, and puts zeros behind the last row.
    __device__ __forceinline__ void load_and_clean_values(unsigned run, int first_row) {
        constexpr int kVectors = kPanelRowBytes / 16;
        const unsigned block = num_blocks - 1;
        load_pending_values(memory.run_message(run).head, memory.v_loaded());
        memory.v_loaded().wait(memory.num_cleaned() & 1);
        __syncwarp();
        if (elect_lane())
            ++memory.num_cleaned();
        for (int i = first_row * kVectors + threadIdx.x % 32; i < Config::kKeys * kVectors; i += 32) {
#pragma unroll
            for (int panel = 0; panel < panels(Config::kVDim); ++panel)
                store_zeros(memory.v(block) + panel * Config::kKeys * kPanelRowBytes + i * 16);
        }
        fence_shared_for_async();
        __syncwarp();
        if (elect_lane())
            memory.v_full(block).arrive();
    }

    __device__ __forceinline__ static void store_zeros(SharedAddress to) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
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
