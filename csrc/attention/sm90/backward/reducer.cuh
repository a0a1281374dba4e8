#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/key_sums.cuh"
#include "csrc/common/sm90/bulk.cuh"

// The reducer warp adds dQ of each step to the sums in global memory and, where work items have parts of a group, dK and
// dV of each item.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardReducer {
    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int lane;

    __device__ __forceinline__ void run() const {
        for (int part = 0; part < Config::kConsumers; ++part)
            release(part);
#pragma unroll 1
        for (unsigned step = 0;; ++step) {
            wait_for_part(0);
            if (memory.done() != 0)
                break;
            const StepDescriptor& descriptor = memory.descriptor(step);
            if (args.deterministic)
                add_in_order(descriptor, step);
            else
                add(descriptor);
            if constexpr (Config::kCanAddGradients)
                if (memory.schedule().adds_gradients() and descriptor.last)
                    add_gradients(descriptor);
        }
        if (elect_lane())
            bulk_wait();
    }

private:
    // Lets a warpgroup store its next part.
    __device__ __forceinline__ static void release(int part) {
        __syncwarp();
        named_barrier_arrive(kPartEmpty + part, kPartThreads);
    }

    __device__ __forceinline__ float* target(const StepDescriptor& descriptor) const {
        return args.workspace.dq + int64_t{descriptor.row} * Config::kSumColumns;
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

    // Adds dK and dV of the work item whose last step this is. In a fixed order, each head set waits for the one before.
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

    // Adds dQ of a step when its ticket comes up. The next ticket has to wait until the additions are complete, but
    // parts are released when they were read.
    __device__ __forceinline__ void add_in_order(const StepDescriptor& descriptor, unsigned step) const {
        float* const to = target(descriptor);
        int* const counter = args.workspace.additions + descriptor.row / Config::kRows;
        memory.ticketed(step).wait(memory.step_parity(step));
#pragma unroll
        for (int pass = 0; pass < Config::kDqPasses; ++pass) {
            for (int part = 0; part < Config::kConsumers; ++part)
                if (pass + part > 0)
                    wait_for_part(part);
            if (elect_lane()) {
                if (pass == 0)
                    wait_for_ticket(counter, descriptor.ticket);
                for (int part = 0; part < Config::kConsumers; ++part)
                    add_dq(to, pass, part);
                bulk_wait_read<0>();
            }
            for (int part = 0; part < Config::kConsumers; ++part)
                release(part);
        }
        if (elect_lane()) {
            bulk_wait();
            finish_ticket(counter);
        }
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
