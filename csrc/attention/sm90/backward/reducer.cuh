#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/bulk.cuh"

// The reducer warp: adds the gradients of blocks of queries to those in global memory.
//
// Where the order of sums is fixed, a block of queries counts the additions that were made, and each waits for its
// turn: tiles of keys come from the first to the last, the bands of a tile from the last of the plan to the first.
// Tiles are taken in that order too, so that an addition only waits for tiles that running CTAs have taken, and the
// first of those that are not done waits for nothing. All work through blocks and query heads in the same order: under
// a causal mask the first tiles are the longest, and the blocks that all have come first, so that a CTA is one step
// behind another, not more. What a tile shares with the next one are the bands of its last keys: it begins with them,
// and the next one ends.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardReducer {
    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int lane;

    __device__ __forceinline__ void run() const {
        for (int part = 0; part < Config::kConsumers; ++part)
            give_back(part);
#pragma unroll 1
        for (unsigned step = 0;; ++step) {
            await_part(0);
            if (memory.done() != 0)
                break;
            if (args.deterministic)
                add_in_turn(memory.descriptor(step));
            else
                add(memory.descriptor(step));
        }
        if (elect_lane())
            bulk_wait();
    }

private:
    __device__ __forceinline__ static void give_back(int part) {
        __syncwarp();
        named_barrier_arrive(kDqEmpty + part, kDqThreads);
    }

    __device__ __forceinline__ float* target(const StepDescriptor& message) const {
        return args.workspace.dq + int64_t{message.row} * (Config::kTransposedDq ? kPanelColumns : Config::kDim);
    }

    __device__ __forceinline__ int64_t part_stride() const {
        return Config::kTransposedDq ? args.workspace.dq_panel : Config::kDqPartBytes / 4;
    }

    __device__ __forceinline__ static void await_part(int part) {
        named_barrier_sync(kDqFull + part, kDqThreads);
    }

    // Those of a pass lie `kDqPasses` parts apart in global memory.
    __device__ __forceinline__ void add_part(float* to, int pass, int part) const {
        const int number = part * Config::kDqPasses + pass;
        bulk_add(to + number * part_stride(), memory.dq() + part * Config::kDqPartBytes,
                 min(Config::kDqPartBytes, Config::kSumBytes - number * Config::kDqPartBytes));
        bulk_commit();
    }

    // The first part of the first pass is there.
    __device__ __forceinline__ void add(const StepDescriptor& message) const {
        float* const to = target(message);
#pragma unroll
        for (int pass = 0; pass < Config::kDqPasses; ++pass) {
#pragma unroll
            for (int part = 0; part < Config::kConsumers; ++part) {
                if (pass + part > 0)
                    await_part(part);
                if (elect_lane())
                    add_part(to, pass, part);
            }
            // Each part is given back when it was read, while the next ones still are.
            if constexpr (Config::kConsumers == 3)
                finish_reading<2>(0);
            finish_reading<1>(Config::kConsumers - 2);
            finish_reading<0>(Config::kConsumers - 1);
        }
    }

    template <int kPending> __device__ __forceinline__ static void finish_reading(int part) {
        if (elect_lane())
            bulk_wait_read<kPending>();
        give_back(part);
    }

    // The next turn begins when the additions are complete, but the parts are given back when they were read.
    __device__ __forceinline__ void add_in_turn(const StepDescriptor& message) const {
        float* const to = target(message);
        int* const turns = args.workspace.turns + message.row / Config::kRows;
        const int turn = turn_of(message);
#pragma unroll
        for (int pass = 0; pass < Config::kDqPasses; ++pass) {
            for (int part = 0; part < Config::kConsumers; ++part)
                if (pass + part > 0)
                    await_part(part);
            if (elect_lane()) {
                if (pass == 0)
                    await_turn(turns, turn);
                for (int part = 0; part < Config::kConsumers; ++part)
                    add_part(to, pass, part);
                bulk_wait_read<0>();
            }
            for (int part = 0; part < Config::kConsumers; ++part)
                give_back(part);
        }
        if (elect_lane()) {
            bulk_wait();
            end_turn(turns);
        }
    }

    __device__ __forceinline__ static void await_turn(const int* turns, int turn) {
        int done;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(turns) : "memory");
        } while (done != turn);
        fence_global_for_async();
    }

    // The additions are complete in global memory.
    __device__ __forceinline__ static void end_turn(int* turns) {
        fence_global_for_async();
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
    }

    // How many additions to the block come before this one.
    __device__ __forceinline__ int turn_of(const StepDescriptor& message) const {
        const int blocks_per_head = args.workspace.rows_per_head / Config::kRows;
        const Range window = args.workspace.windows[int64_t{message.mask} * blocks_per_head + message.block];
        const ScheduledBand* bands = args.bands + int64_t{message.mask} * args.capacity;
        const int first = message.block * Config::kRows;
        const Range queries{first, first + Config::kRows};
        int before = 0;
#pragma unroll 1
        for (int i = window.begin + lane; i < window.end; i += 32) {
            const ScheduledBand band = bands[i];
            const Range keys = rows_of_keys({band.q0, band.q1, band.k0, band.k1, band.lo, band.hi}, queries);
            if (is_empty(keys))
                continue;
            const Range tiles{keys.begin / Config::kKeys, ceil_div(keys.end, Config::kKeys)};
            before += max(0, min(tiles.end, message.tile) - tiles.begin);
            before += i > message.band and tiles.begin <= message.tile and message.tile < tiles.end;
        }
        return __reduce_add_sync(~0u, before);
    }
};

}  // namespace jaxmagi::sm90
