#pragma once

#include <cstdint>

// Flags in memory that several GPUs reach.

namespace jaxmagi::sm90 {

// A thread that reads the value with load_acquire also sees all writes that were visible to the thread that stored it,
// or added to it.
__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Stores or loads without ordering other accesses.
__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// Returns the time of a clock with a resolution of about a microsecond.
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

}  // namespace jaxmagi::sm90
