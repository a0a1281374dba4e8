#pragma once

#include "csrc/common/sm90/stmatrix.cuh"
#include "csrc/common/sm90/wgmma.cuh"
#include "csrc/overlap/sm90/claims.cuh"

namespace jaxmagi::overlap {

// Multiplies 64 rows of a tile, and hands panels of the product to the mover. One warpgroup is a consumer.
template <typename Config> struct GemmConsumer {
    using Element = typename Config::Element;
    using Sums = float[kTileColumns / 2];        // of a thread
    using PanelSums = float[kPanelColumns / 2];  // of a panel alone

    GemmMemory<Config> memory;
    const GemmArguments& arguments;
    int index, thread;  // of the warpgroup, and in it

    __device__ __forceinline__ void run() const {
        ClaimedTiles<Config> tiles(memory, arguments);
        int num_loaded = 0;  // panels in each buffer
        RingPlace<Config::kStages> stage;
#pragma unroll 1
        for (TilePlace place; tiles.next(place, thread % 32 == 0);) {
            Sums sums;
            multiply(sums, stage);
            if (Config::kCollective == Collective::kReduceScatter and place.rank == arguments.shape.rank)
                add_and_hand_over(sums, num_loaded);
            else
                hand_over(sums);
        }
    }

private:
    // Each step is issued before the step before it is waited for, whose stage is then released.
    __device__ __forceinline__ void multiply(Sums& sums, RingPlace<Config::kStages>& stage) const {
        const int steps = ceil_div(arguments.shape.inner, Config::kDepth);
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            memory.full(stage.index).wait(stage.parity);
            issue(sums, stage.index, step > 0);
            wgmma_wait<1>();
            if (step > 0)
                release(before);
            before = stage.index;
            stage.next();
        }
        wgmma_wait<0>();
        fence_operand(sums);
        release(before);
    }

    __device__ __forceinline__ void issue(Sums& sums, int stage, bool accumulate) const {
        constexpr int kStep = 16;
        const SwizzledOperand x(memory.x(stage) + index * 64 * kPanelRowBytes, 0);
        const SwizzledOperand w(memory.w(stage), Config::kTransposedW ? 0 : Config::kDepth * kPanelRowBytes);
        wgmma_fence();
        fence_operand(sums);
#pragma unroll
        for (int k = 0; k < Config::kDepth; k += kStep)
            Wgmma<Element, kTileColumns>::template mma<0, not Config::kTransposedW>(
                sums, x.at(k * kElementBytes), w.at(Config::kTransposedW ? k * kElementBytes : k * kPanelRowBytes),
                accumulate or k > 0);
        wgmma_commit();
        fence_operand(sums);
    }

    __device__ __forceinline__ void release(int stage) const {
        if (thread % 32 < kClusterCtas)
            arrive_at(memory.empty(stage), thread % 32);
    }

    // Hands a tile over as it is.
    __device__ __forceinline__ void hand_over(const Sums& sums) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            if (panel == 0 or panel >= Config::kBuffers)
                named_barrier_sync(buffer_free<Config>(index, panel), kHandOverThreads);
            write(&sums[panel * kPanelColumns / 2], panel);
            fill(panel);
        }
    }

    // Adds up a tile over ranks, in their order, and hands it over. Panels of other ranks come through the buffers, and
    // the sum takes the place of the last one.
    __device__ __forceinline__ void add_and_hand_over(const Sums& sums, int& num_loaded) const {
        const int ranks = arguments.shape.ranks, rank = arguments.shape.rank;
        int item = 0;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const float* const own = &sums[panel * kPanelColumns / 2];
            PanelSums total{};
#pragma unroll 1
            for (int source = 0; source < ranks; ++source) {
                if (source == rank) {
                    add_own(total, own);
                } else {
                    add_received(total, item, num_loaded + item / Config::kBuffers);
                    ++item;
                }
                const bool is_last = source == (rank == ranks - 1 ? ranks - 2 : ranks - 1);
                if (source != rank and not is_last)
                    fill(item - 1);  // the next one may come
            }
            write(total, item - 1);
            fill(item - 1);
        }
        num_loaded += item / Config::kBuffers;
    }

    static __device__ __forceinline__ void add_own(PanelSums& total, const float* own) {
#pragma unroll
        for (int i = 0; i < kPanelColumns / 2; ++i)
            total[i] += own[i];
    }

    // loaded: how many panels the buffer had before.
    __device__ __forceinline__ void add_received(PanelSums& total, int item, int loaded) const {
        memory.loaded(index, item).wait(loaded % 2);
        const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
        const SharedAddress at = memory.buffer(index, item) + row * kPanelRowBytes + lane % 4 * 4;
#pragma unroll
        for (int chunk = 0; chunk < kPanelColumns / 8; ++chunk)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t packed;
                asm volatile("ld.shared.b32 %0, [%1];"
                             : "=r"(packed)
                             : "r"(at + half * 8 * kPanelRowBytes + (chunk ^ row % 8) * 16));
                const float2 both = Element::unpack(packed);
                total[4 * chunk + 2 * half] += both.x;
                total[4 * chunk + 2 * half + 1] += both.y;
            }
    }

    // Writes a panel into a buffer.
    __device__ __forceinline__ void write(const float* values, int item) const {
        // Lane l has the address of row l % 16 of the warp, at columns 8 · (l / 16) of 16.
        const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
        const SharedAddress at = memory.buffer(index, item) + row * kPanelRowBytes;
#pragma unroll
        for (int c = 0; c < kPanelColumns; c += 16) {
            const float* const d = values + c / 2;
            const uint32_t matrices[4] = {Element::pack(d[0], d[1]), Element::pack(d[2], d[3]),
                                          Element::pack(d[4], d[5]), Element::pack(d[6], d[7])};
            store_matrices(at + ((c / 8 + lane / 16) ^ row % 8) * 16, matrices);
        }
    }

    // Lets the mover have a buffer.
    __device__ __forceinline__ void fill(int item) const {
        fence_shared_for_async();
        named_barrier_arrive(buffer_filled<Config>(index, item), kHandOverThreads);
    }
};

}  // namespace jaxmagi::overlap
