#pragma once

#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/warpgroup.cuh"

namespace jaxmagi::sm90 {

// The place of a thread among the consumers of a backward kernel, whatever its variant.
struct ConsumerThread {
    int warpgroup, thread;  // among the consumers; in the warpgroup

    // The thread in the warpgroup. It is opaque in each call: what is computed from it would stay in registers.
    __device__ __forceinline__ unsigned index() const { return opaque(static_cast<unsigned>(thread)); }
    __device__ __forceinline__ int index_among_consumers() const {
        return static_cast<int>(warpgroup * kWarpgroupThreads + index());
    }
    // First row and first column of the thread's part of an accumulator.
    __device__ __forceinline__ int row() const {
        const unsigned same_thread = index();
        return static_cast<int>(same_thread / 32 * 16 + same_thread % 32 / 4);
    }
    __device__ __forceinline__ int column() const { return static_cast<int>(index() % 4 * 2); }

    // Releases an operand. One thread speaks for its warpgroup, since the four warps finish a product together.
    __device__ __forceinline__ void release(Mbarrier empty) const {
        if (thread == 0)
            empty.arrive();
    }
    // Arrives once for each warp, where no product keeps the warps together.
    __device__ __forceinline__ void arrive_by_warps(Mbarrier barrier) const {
        __syncwarp();
        if (thread % 32 == 0)
            barrier.arrive();
    }
};

}  // namespace jaxmagi::sm90
