#pragma once

#include "csrc/attention/sm90/forward/arguments.cuh"
#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/tma.cuh"

// The producer warp streams queries, keys and values through shared memory.
//
// It cuts each run of keys into blocks from right to left. The remainder goes to the first block, which is masked most
// of the time: keys of it that the next block has too do not count there. So no block holds a key that the tile does
// not see, and NaN in such keys never reaches the product with the values. Only a run shorter than one block is
// followed by such keys; the producer overwrites their values with zeros.
// Where the remainders of two runs of a tile fit in one block, the first block of the first run also holds the
// remainder of the second run, its packed tail, in place of the keys that do not count.

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
            const ForwardBandRun& band_run = memory.band_run(run);
            if (is_empty(band_run.keys))
                announce_without_queries(band_run.item);
            else
                produce(run);
            if (band_run.stop)
                return;
            const bool last = band_run.last;
            const KeySource source = source_of(band_run, pending_key);
            __syncwarp();
            if (elect_lane())
                memory.run_empty(opaque(run)).arrive();
            if (last)
                load_pending_values(source, memory.v_full(num_blocks - 1));
        }
    }

private:
    __device__ __forceinline__ void announce_without_queries(int item) const {
        memory.q_empty().wait((item & 1) ^ 1);
        if (elect_lane())
            memory.q_full().arrive();
    }

    __device__ __forceinline__ void produce(unsigned run) {
        const ForwardBandRun& band_run = memory.band_run(run);
        if (elect_lane())
            produce_blocks(run);
        __syncwarp();
        const int size = band_run.keys.end - band_run.keys.begin;
        num_blocks += ceil_div(size - band_run.packed_keys, Config::kKeys);
        pending_key = band_run.keys.begin;
        if (size < Config::kKeys and band_run.keys.end < args.kv_len)
            load_and_pad_values(run, size);
    }

    // Which of the tensor maps of keys and values has a block, and the head there.
    struct KeySource {
        int maps, head, example;
    };

    __device__ __forceinline__ static KeySource source_in(const ForwardBandRun& run, int maps) {
        return {maps, run.heads[maps].head, run.heads[maps].example};
    }

    // Returns the source of a block that begins with a key.
    __device__ __forceinline__ static KeySource source_of(const ForwardBandRun& run, int key) {
        return source_in(run, key >= run.split_key);
    }

    // Where the production of a run is. Blocks go from right to left, so those of received keys come first.
    struct Step {
        TileBand band;
        unsigned block;         // the last one whose keys have been loaded
        int key, previous_key;  // the first keys of the next block, and of the last one, whose values are still to load
    };

    // Keys of the first block come before the queries, whose place becomes free later, and values come after the keys
    // of the next block, which are needed first. The first key of the run is read again for the steps: ptxas would
    // spill it.
    __device__ __forceinline__ void produce_blocks(unsigned run) const {
        constexpr int kStep = Config::kKeys;
        const ForwardBandRun& band_run = memory.band_run(run);
        const int first_key = band_run.keys.begin, end = band_run.keys.end - band_run.packed_keys;
        const int over = (end - first_key) % kStep;
        const int begin = over == 0 or end - first_key < kStep ? 0 : kStep - over;  // the first column that counts
        const int key = max(end - kStep, first_key);
        Step step{band_run.band, num_blocks, key + begin - kStep, key};
        memory.k_empty(step.block).wait(memory.parity(step.block) ^ 1);
        memory.descriptor(step.block) = step.band.block(key, begin, min(kStep, end - key), kStep);
        if (band_run.has_packed_tail)
            load_packed_keys(step.block, run);
        else
            load_keys(step.block, key, source_of(band_run, key));
        if (band_run.first)
            load_queries(band_run.item);
        if (pending_key != kNone)
            load_values(step.block - 1, pending_key, source_of(band_run, pending_key), memory.v_full(step.block - 1));
        if (band_run.has_packed_tail) {  // and so at least two blocks
            load_next_keys(step, source_of(band_run, step.key));
            load_packed_values(step.block - 1, run);
        }
        produce_steps<1>(step, band_run, max(band_run.split_key, band_run.keys.begin));
        if (step.key >= band_run.keys.begin and step.previous_key >= band_run.split_key)
            produce_step(step, source_in(band_run, 0), source_in(band_run, 1));
        produce_steps<0>(step, band_run, band_run.keys.begin);
    }

    // The consumer warps share the issue slots: every instruction in this loop delays them. So the tensor maps of keys
    // and values are known here: kMaps says which.
    template <int kMaps>
    __device__ __forceinline__ void produce_steps(Step& step, const ForwardBandRun& run, int first_key) const {
        const KeySource source = source_in(run, kMaps);
#pragma unroll 1
        while (step.key >= first_key)
            produce_step(step, source, source);
    }

    __device__ __forceinline__ void produce_step(Step& step, const KeySource& source, const KeySource& previous) const {
        const int previous_key = step.previous_key;
        load_next_keys(step, source);
        load_values(step.block - 1, previous_key, previous, memory.v_full(step.block - 1));
        wait_until_issued();
    }

    __device__ __forceinline__ void load_next_keys(Step& step, const KeySource& source) const {
        ++step.block;
        memory.k_empty(step.block).wait(memory.parity(step.block) ^ 1);
        memory.descriptor(step.block) = step.band.block(step.key, 0, Config::kKeys, Config::kKeys);
        load_keys(step.block, step.key, source);
        wait_until_issued();
        step.previous_key = step.key;
        step.key -= Config::kKeys;
    }

    __device__ __forceinline__ void load_keys(unsigned block, int key, const KeySource& from) const {
        memory.k_full(block).arrive_and_expect(Config::kKBytes);
        load<Config::kDim>(memory.k(block), maps.k[from.maps], Config::kKeys, {0, from.head, key, from.example},
                           memory.k_full(block));
    }

    __device__ __forceinline__ void load_values(unsigned block, int key, const KeySource& from,
                                                Mbarrier arrived) const {
        memory.v_empty(block).wait(memory.parity(block) ^ 1);
        arrived.arrive_and_expect(Config::kVBytes);
        load<Config::kVDim>(memory.v(block), maps.v[from.maps], Config::kKeys,
                            {0, from.head, key, from.example}, arrived);
    }

    // Returns how many columns the packed tail of a block has: those before the first one of the run, in whole parts.
    // They are the last keys of the next run, of which only its packed_keys last ones count.
    __device__ __forceinline__ int tail_columns(unsigned block) const {
        return memory.descriptor(block).first_column / kPartKeys * kPartKeys;
    }

    __device__ __forceinline__ void load_packed_keys(unsigned block, unsigned run) const {
        memory.run_full(run + 1).wait(memory.run_parity(run + 1));
        const int tail = tail_columns(block);
        const ForwardBandRun& next = memory.band_run(run + 1);
        memory.packed_tail(block) = next.band.block(next.keys.end - tail, tail - next.packed_keys, tail, Config::kKeys);
        memory.descriptor(block).has_packed_tail = true;
        memory.k_full(block).arrive_and_expect(Config::kKBytes);
        load_parts<Config::kDim>(memory.k(block), maps.k_part, run, tail, memory.k_full(block));
    }

    __device__ __forceinline__ void load_packed_values(unsigned block, unsigned run) const {
        memory.v_empty(block).wait(memory.parity(block) ^ 1);
        memory.v_full(block).arrive_and_expect(Config::kVBytes);
        load_parts<Config::kVDim>(memory.v(block), maps.v_part, run, tail_columns(block), memory.v_full(block));
    }

    template <int kColumns>
    __device__ __forceinline__ void load_parts(SharedAddress to, const CUtensorMap (&part_maps)[2], unsigned run,
                                               int tail, Mbarrier arrived) const {
        const ForwardBandRun& band_run = memory.band_run(run);
        const int tail_key = memory.band_run(run + 1).keys.end - tail;
        const int key = band_run.keys.end - band_run.packed_keys - Config::kKeys;
#pragma unroll 1
        for (int i = 0; i < Config::kKeys; i += kPartKeys) {
            const int first_key = i < tail ? tail_key : key;
            const auto [maps, head, example] = source_of(band_run, first_key);
            load<kColumns>(to + i * kPanelRowBytes, part_maps[maps], Config::kKeys, {0, head, i + first_key, example},
                           arrived);
        }
        wait_until_issued();
    }

    __device__ __forceinline__ void load_queries(int item) const {
        memory.q_empty().wait((item & 1) ^ 1);
        const ForwardWorkItem& work = memory.work_item(item);
        memory.q_full().arrive_and_expect(Config::kQBytes);
        load<Config::kDim>(memory.q(), maps.q, Config::kRows, {0, work.head, work.row, work.example},
                           memory.q_full());
    }

    // Called by the whole warp.
    __device__ __forceinline__ void load_pending_values(const KeySource& source, Mbarrier arrived) {
        if (pending_key != kNone and elect_lane())
            load_values(num_blocks - 1, pending_key, source, arrived);
        pending_key = kNone;
    }

    // Loads the values of the newest block, which is all of a short run, and overwrites those from first_row on with
    // zeros.
    __device__ __forceinline__ void load_and_pad_values(unsigned run, int first_row) {
        constexpr int kVectors = kPanelRowBytes / 16;
        const unsigned block = num_blocks - 1;
        load_pending_values(source_of(memory.band_run(run), pending_key), memory.v_loaded());
        memory.v_loaded().wait(memory.num_zeroed() & 1);
        __syncwarp();
        if (elect_lane())
            ++memory.num_zeroed();
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
