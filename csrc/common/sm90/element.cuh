#pragma once

#include <cuda_fp16.h>

#include <cstdint>

// The 16-bit types of the matrix units, as pairs in a 32-bit register.

namespace jaxmagi::sm90 {

struct BFloat16 {
    // Rounds two numbers to nearest and puts `low` in the low half.
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ float2 unpack(uint32_t packed) {
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
    }
};

struct Float16 {
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ float2 unpack(uint32_t packed) {
        return __half22float2(*reinterpret_cast<const __half2*>(&packed));
    }
};

}  // namespace jaxmagi::sm90
