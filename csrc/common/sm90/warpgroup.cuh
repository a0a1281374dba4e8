#pragma once

#include <cstdint>

// Named barriers, the division of registers between warpgroups, and values that a warp shares.

namespace jaxmagi::sm90 {

inline constexpr int kWarpgroupThreads = 128;

// `threads` counts those that sync and those that arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Of lane 0, by the whole warp. The compiler then knows that all lanes have the same, and may keep it, and what follows
// from it, in uniform registers.
__device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(~0u, value, 0);
}

// The same, but for the compiler another number: what follows from it is found again, instead of kept in registers, for
// which ptxas would spill others.
template <typename Number> __device__ __forceinline__ Number opaque(Number number) {
    static_assert(sizeof(Number) == 4);
    asm volatile("" : "+r"(number));
    return number;
}

// Read anew by each call, so that they take no registers in between.
__device__ __forceinline__ int lane_index() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
__device__ __forceinline__ int grid_size() {
    int ctas;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
    return ctas;
}

// True for one lane, by the whole warp. The compiler knows that it is one: behind any other condition it would loop
// over the lanes around every TMA instruction.
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

// By all warps of a warpgroup. The sum over the CTA may not exceed what it was launched with.
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jaxmagi::sm90
