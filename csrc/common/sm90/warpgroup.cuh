#pragma once

// Named barriers and the division of registers between warpgroups.

namespace jaxmagi::sm90 {

inline constexpr int kWarpgroupThreads = 128;

// `threads` counts those that sync and those that arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// By all warps of a warpgroup. The sum over the CTA may not exceed what it was launched with.
template <int kRegisters> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jaxmagi::sm90
