#pragma once

#include <cstdint>

// Arithmetic on a thread's part of a block of logits, for both passes.

namespace jaxmagi::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Has a relative error of 7e-7. The exponential loses digits near 0, where the series (up to x^7) has them.
__device__ __forceinline__ float fast_tanh(float x) {
    const float large = 1.f - 2.f * reciprocal_approx(exp2_approx(x * (2.f * kLog2E)) + 1.f);
    const float square = x * x;
    const float series = fmaf(fmaf(fmaf(-17.f / 315.f, square, 2.f / 15.f), square, -1.f / 3.f), square, 1.f);
    return fabsf(x) < 0.25f ? x * series : large;
}

// Returns how many of a thread's columns (0, 1, 8, 9, 16, 17, ...) are smaller than `column`.
__device__ __forceinline__ int columns_below(int column) {
    return column < 0 ? 0 : column / 8 * 2 + min(column % 8, 2);
}

// Rounds an accumulator to 16-bit numbers in the layout of operand A, 16 columns at a time.
template <typename Element, int kCount>
__device__ __forceinline__ void round_to_operand(const float (&p)[kCount], uint32_t (&operand)[kCount / 8][4]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i)
        operand[i / 4][i % 4] = Element::pack(p[2 * i], p[2 * i + 1]);
}

}  // namespace jaxmagi::sm90
