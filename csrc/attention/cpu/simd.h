#pragma once

#include <cstdint>

#include "csrc/attention/cpu/isa.h"

namespace jaxmagi::cpu::JAXMAGI_ISA {

template <typename T> struct Simd;

template <> struct Simd<float> {
    static constexpr int kLanes = kVectorBytes / 4;
    typedef float Vec __attribute__((vector_size(kVectorBytes), may_alias));
    typedef int32_t Bits __attribute__((vector_size(kVectorBytes), may_alias));
    static constexpr float kInfinity = __builtin_inff();
};

template <> struct Simd<double> {
    static constexpr int kLanes = kVectorBytes / 8;
    typedef double Vec __attribute__((vector_size(kVectorBytes), may_alias));
    typedef int64_t Bits __attribute__((vector_size(kVectorBytes), may_alias));
    static constexpr double kInfinity = __builtin_inf();
};

template <typename T> using vec_t = typename Simd<T>::Vec;
template <typename T> using bits_t = typename Simd<T>::Bits;
template <typename T> inline constexpr int kLanes = Simd<T>::kLanes;
template <typename T> inline constexpr T kInfinity = Simd<T>::kInfinity;

template <typename T> inline vec_t<T> load(const T* p) {
    return *reinterpret_cast<const vec_t<T>*>(p);
}

template <typename T> inline void store(T* p, vec_t<T> x) {
    *reinterpret_cast<vec_t<T>*>(p) = x;
}

template <typename T> inline vec_t<T> broadcast(T x) {
    return x - vec_t<T>{};  // exact for -0 too, unlike a sum with 0, so that it takes no instruction
}

template <typename T> inline void fill(T* data, int64_t count, T value) {
    for (int64_t i = 0; i < count; ++i)
        data[i] = value;
}

template <typename T> inline bits_t<T> lane_indices() {
    bits_t<T> lanes;
    for (int i = 0; i < kLanes<T>; ++i)
        lanes[i] = i;
    return lanes;
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
