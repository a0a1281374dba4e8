#pragma once

#include <cstdint>

// Named barriers, values that a warp shares, and the division of registers between warpgroups.

namespace jaxmagi::sm90 {

inline constexpr int kWarpgroupThreads = 128;

// Waits until `threads` threads have called sync or arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts as one of the `threads` threads without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Returns the value of lane 0 to the whole warp. The compiler then knows that the lanes agree and may keep the value,
// and what is computed from it, in uniform registers.
__device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(~0u, value, 0);
}

// Returns the same value, which the compiler takes for a new one: the empty asm may have changed its register. So
// values computed from it are computed again rather than kept in registers over a loop, where ptxas would spill others
// for them.
template <typename T> __device__ __forceinline__ T opaque(T value) {
    static_assert(sizeof(T) == 4);
    asm volatile("" : "+r"(value));
    return value;
}

// Reads the special register at each call, so that the value takes no register in between.
__device__ __forceinline__ int lane_index() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Returns true to one lane. Called by the whole warp. The compiler knows that it is one lane: under any other condition
// it would loop over the lanes around every TMA instruction.
__device__ __forceinline__ bool elect_lane() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "elect.sync _|elected, 0xffffffff;\n"
        "selp.b32 %0, 1, 0, elected;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
}

// Raises or lowers the registers of each thread. Called by all warps of a warpgroup; the sum over the CTA may not
// exceed that at launch.
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jaxmagi::sm90
