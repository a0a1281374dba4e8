#pragma once

#include "csrc/attention/cpu/simd.h"

namespace jaxmagi::cpu::JAXMAGI_ISA {

// exp(x) = 2^n exp(r) with |r| <= ln(2) / 2. The float polynomial is that of Cephes' expf, the double one Taylor's.
// 0 below kMin; +inf where n is beyond the exponents: from 88.38 on in float, from 709.44 on in double.
template <typename T> struct ExpTraits;

template <> struct ExpTraits<float> {
    static constexpr float kMin = -87.33f, kMax = 89.0f;  // kMax keeps n small enough to be shifted
    static constexpr float kRound = 12582912.0f;          // 1.5 * 2^23: adding it leaves n in the low mantissa bits
    static constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440e-4f;
    static constexpr int kMantissaBits = 23, kBias = 127;
    static constexpr float kPolynomial[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                            4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f,
                                            1.0f,             1.0f};
};

template <> struct ExpTraits<double> {
    static constexpr double kMin = -708.39, kMax = 710.0;
    static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double kLn2Hi = 6.93145751953125e-1, kLn2Lo = 1.42860682030941723212e-6;
    static constexpr int kMantissaBits = 52, kBias = 1023;
    static constexpr double kPolynomial[] = {
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};
};

template <typename T> inline vec_t<T> exp(vec_t<T> x) {
    using Traits = ExpTraits<T>;
    constexpr T kLog2E = T(1.44269504088896340736);
    // Comparisons are arranged so that NaN takes the computed branch and stays NaN.
    const vec_t<T> clamped = x > Traits::kMax ? broadcast(Traits::kMax) : x;
    const vec_t<T> shifted = clamped * kLog2E + Traits::kRound;
    const vec_t<T> n = shifted - Traits::kRound;
    const vec_t<T> r = (clamped - n * Traits::kLn2Hi) - n * Traits::kLn2Lo;
    vec_t<T> sum = broadcast(Traits::kPolynomial[0]);
#pragma GCC unroll 16
    for (int i = 1; i < static_cast<int>(sizeof(Traits::kPolynomial) / sizeof(T)); ++i)
        sum = sum * r + Traits::kPolynomial[i];
    const bits_t<T> power = ((bits_t<T>)shifted + Traits::kBias) << Traits::kMantissaBits;
    return x < Traits::kMin ? vec_t<T>{} : sum * (vec_t<T>)power;
}

// tanh(y) / y - 1 over y^2, for |y| < 0.625 (Cephes).
inline vec_t<float> tanh_series(vec_t<float> z) {
    return (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z -
           3.33332819422e-1f;
}

inline vec_t<double> tanh_series(vec_t<double> z) {
    const vec_t<double> p =
        (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
    const vec_t<double> q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z +
                            4.84406305325125486048e3;
    return p / q;
}

template <typename T> inline vec_t<T> tanh(vec_t<T> y) {
    const vec_t<T> magnitude = y < T(0) ? -y : y;
    const vec_t<T> decay = exp<T>(T(-2) * magnitude);
    const vec_t<T> tail = (T(1) - decay) / (T(1) + decay);
    const vec_t<T> signed_tail = y < T(0) ? -tail : tail;
    const vec_t<T> square = y * y;
    return magnitude < T(0.625) ? y + y * square * tanh_series(square) : signed_tail;
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
