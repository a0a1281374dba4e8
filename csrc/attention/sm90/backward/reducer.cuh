#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/key_sums.cuh"
#include "csrc/attention/sm90/backward/tickets.cuh"
#include "csrc/common/sm90/bulk.cuh"

// The reducer adds dQ of each step to the sums in global memory and, where work items have parts of a group, dK and dV
// of each item. It is one warp or, with a fixed order of sums, two that take turns step by step: while the additions of
// a step complete, until another CTA may begin with its own, the other warp computes the ticket of the next step and
// adds.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardReducer {
    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int index;  // of the warp: 0, or 1 for the second one of a fixed order

    __device__ __forceinline__ void run() const {
        if (index == 0) {
            for (int part = 0; part < Config::kConsumers; ++part)
                release(part);
            if (args.deterministic)
                named_barrier_arrive(kReducerTurn, kTurnThreads);
        }
        const int num_warps = args.deterministic ? 2 : 1;
#pragma unroll 1
        for (unsigned step = index;; step += num_warps) {
            memory.described(step).wait(memory.step_parity(step));
            const StepDescriptor& descriptor = memory.descriptor(step);
            if (descriptor.head < 0)
                break;
            if (args.deterministic)
                run_step_in_order(descriptor);
            else
                run_step(descriptor);
        }
        if (elect_lane())
            bulk_wait();
    }

private:
    __device__ __forceinline__ void run_step(const StepDescriptor& descriptor) const {
        wait_for_part(0);
        add(descriptor);
        if constexpr (Config::kCanAddGradients)
            if (ends_item(descriptor))
                add_gradients(descriptor);
    }

    // Adds when the ticket of the step comes up. The parts are those of this step from the turn of the warp until it
    // passes the turn on.
    __device__ __forceinline__ void run_step_in_order(const StepDescriptor& descriptor) const {
        const int ticket = ticket_of<Config>(args, descriptor);
        named_barrier_sync(kReducerTurn + index, kTurnThreads);
        wait_for_part(0);
        if (elect_lane())
            wait_for_ticket(additions(descriptor), ticket);
        __syncwarp();
        add(descriptor);
        // The other warp goes on with the next step before the additions of this one are complete.
        const bool has_gradients = ends_item(descriptor);
        if (not has_gradients)
            pass_turn();
        if (elect_lane()) {
            bulk_wait();
            finish_ticket(additions(descriptor));
        }
        if constexpr (Config::kCanAddGradients)
            if (has_gradients) {
                add_gradients(descriptor);
                pass_turn();
            }
    }

    __device__ __forceinline__ void pass_turn() const {
        __syncwarp();
        named_barrier_arrive(kReducerTurn + 1 - index, kTurnThreads);
    }

    // Returns true if dK and dV of the work item are added up behind this step.
    __device__ __forceinline__ bool ends_item(const StepDescriptor& descriptor) const {
        return Config::kCanAddGradients and descriptor.last and memory.schedule().adds_gradients();
    }

    // Lets a warpgroup store its next part.
    __device__ __forceinline__ static void release(int part) {
        __syncwarp();
        named_barrier_arrive(kPartEmpty + part, kPartThreads);
    }

    __device__ __forceinline__ float* target(const StepDescriptor& descriptor) const {
        return args.workspace.dq + int64_t{descriptor.row} * Config::kSumColumns;
    }

    // Returns the counter of the additions to the block of a step.
    __device__ __forceinline__ int* additions(const StepDescriptor& descriptor) const {
        return args.workspace.additions + descriptor.row / Config::kRows;
    }

    __device__ __forceinline__ int64_t part_stride() const {
        return Config::kTransposedDq ? int64_t{args.workspace.rows_per_head} * kPanelColumns : Config::kPartBytes / 4;
    }

    __device__ __forceinline__ static void wait_for_part(int part) {
        named_barrier_sync(kPartFull + part, kPartThreads);
    }

    // Adds what a warpgroup has stored in its part.
    __device__ __forceinline__ void add_part(float* to, int part, int bytes) const {
        fence_shared_for_async();  // for what the consumers stored before the barrier
        bulk_add(to, memory.part(part), bytes);
        bulk_commit();
    }

    // Adds one part of dQ. Those of a pass lie `kDqPasses` parts apart in global memory.
    __device__ __forceinline__ void add_dq(float* to, int pass, int part) const {
        const int index = part * Config::kDqPasses + pass;
        const int bytes = min(Config::kPartBytes, Config::kSumBytes - index * Config::kPartBytes);
        add_part(to + index * part_stride(), part, bytes);
    }

    // Adds dQ of a step. The first part of the first pass was waited for.
    __device__ __forceinline__ void add(const StepDescriptor& descriptor) const {
        float* const to = target(descriptor);
#pragma unroll
        for (int pass = 0; pass < Config::kDqPasses; ++pass) {
#pragma unroll
            for (int part = 0; part < Config::kConsumers; ++part) {
                if (pass + part > 0)
                    wait_for_part(part);
                if (elect_lane())
                    add_dq(to, pass, part);
            }
            // Each part is released when it was read, while the next ones are still being read.
            if constexpr (Config::kConsumers == 3)
                finish_reading<2>(0);
            finish_reading<1>(Config::kConsumers - 2);
            finish_reading<0>(Config::kConsumers - 1);
        }
    }

    // Adds dK and dV of the work item whose last step this is. In a fixed order, each head set waits for the one
    // before.
    __device__ __forceinline__ void add_gradients(const StepDescriptor& descriptor) const {
        const int key_head = descriptor.head / memory.schedule().group_size;
        int* const counter = args.workspace.key_additions + key_head * args.workspace.key_tiles + descriptor.tile;
        if (args.deterministic and elect_lane())
            wait_for_ticket(counter, descriptor.head % memory.schedule().group_size / memory.schedule().heads_per_item);
        add_gradient<Config::kDim>(args.workspace.dk, key_head, descriptor.tile);
        add_gradient<Config::kVDim>(args.workspace.dv, key_head, descriptor.tile);
        if (args.deterministic and elect_lane()) {
            bulk_wait();
            finish_ticket(counter);
        }
    }

    // Adds dK or dV of a tile, a part of each warpgroup at a time.
    template <int kColumns>
    __device__ __forceinline__ void add_gradient(float* sums, int key_head, int tile) const {
        using Sums = KeySums<Config, kColumns>;
        float* const to = sums + int64_t{key_head} * args.workspace.rows_per_key_head * kColumns +
                          int64_t{tile} * Config::kKeys * Sums::kTileColumns;
#pragma unroll 1
        for (int pass = 0; pass < Sums::kPasses; ++pass) {
            for (int part = 0; part < Config::kConsumers; ++part) {
                wait_for_part(part);
                if (elect_lane())
                    add_part(to + Sums::offset(pass, part, args.workspace.rows_per_key_head), part, Sums::bytes(pass));
            }
            if (elect_lane())
                bulk_wait_read<0>();
            for (int part = 0; part < Config::kConsumers; ++part)
                release(part);
        }
    }

    template <int kPending> __device__ __forceinline__ static void finish_reading(int part) {
        if (elect_lane())
            bulk_wait_read<kPending>();
        release(part);
    }

    __device__ __forceinline__ static void wait_for_ticket(const int* counter, int ticket) {
        int done;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
        } while (done != ticket);
        fence_global_for_async();
    }

    // Called when the additions are complete in global memory.
    __device__ __forceinline__ static void finish_ticket(int* counter) {
        fence_global_for_async();
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
    }
};

}  // namespace jaxmagi::sm90
