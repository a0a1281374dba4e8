#pragma once

#include "csrc/attention/cpu/simd.h"

namespace jaxmagi::cpu::JAXMAGI_ISA {

// The left factor of a product, read one scalar at a time: element (i, k) is data[i * row + k * depth].
template <typename T> struct Factor {
    const T* data;
    int64_t row, depth;
};

// Row-major, vector-aligned, `stride` a multiple of the vector width.
template <typename T> struct Matrix {
    T* data;
    int64_t stride;
};

// A block of C [rows x vecs] held in registers over the whole depth: per step `vecs` vectors of B are loaded and
// `rows` scalars of A broadcast.
template <typename T, int kRows, int kVecs>
inline void gemm_block(int depth, Factor<T> a, const T* b, int64_t b_stride, T* c, int64_t c_stride, bool accumulate) {
    vec_t<T> sum[kRows][kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j)
            sum[i][j] = accumulate ? load(c + i * c_stride + j * kLanes<T>) : vec_t<T>{};
    for (int k = 0; k < depth; ++k) {
        vec_t<T> right[kVecs];
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j)
            right[j] = load(b + k * b_stride + j * kLanes<T>);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
            const vec_t<T> left = broadcast(a.data[i * a.row + k * a.depth]);
#pragma GCC unroll 2
            for (int j = 0; j < kVecs; ++j)
                sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j)
            store(c + i * c_stride + j * kLanes<T>, sum[i][j]);
}

template <typename T, int kRows, int kVecs>
inline void gemm_tail(int rows, int depth, Factor<T> a, const T* b, int64_t b_stride, T* c, int64_t c_stride,
                      bool accumulate) {
    if constexpr (kRows > 0) {
        if (rows == kRows)
            gemm_block<T, kRows, kVecs>(depth, a, b, b_stride, c, c_stride, accumulate);
        else
            gemm_tail<T, kRows - 1, kVecs>(rows, depth, a, b, b_stride, c, c_stride, accumulate);
    }
}

template <typename T, int kVecs>
inline void gemm_panel(int rows, int depth, Factor<T> a, const T* b, int64_t b_stride, T* c, int64_t c_stride,
                       bool accumulate) {
    int i = 0;
    for (; i + kBlockRows <= rows; i += kBlockRows) {
        const Factor<T> left{a.data + i * a.row, a.row, a.depth};
        gemm_block<T, kBlockRows, kVecs>(depth, left, b, b_stride, c + i * c_stride, c_stride, accumulate);
    }
    const Factor<T> left{a.data + i * a.row, a.row, a.depth};
    gemm_tail<T, kBlockRows - 1, kVecs>(rows - i, depth, left, b, b_stride, c + i * c_stride, c_stride, accumulate);
}

// C = A B, or C += A B: [rows, depth] x [depth, columns], columns a multiple of the vector width.
template <typename T>
inline void gemm(int rows, int64_t columns, int depth, Factor<T> a, Matrix<const T> b, Matrix<T> c, bool accumulate) {
    int64_t j = 0;
    for (; j + 2 * kLanes<T> <= columns; j += 2 * kLanes<T>)
        gemm_panel<T, 2>(rows, depth, a, b.data + j, b.stride, c.data + j, c.stride, accumulate);
    if (j < columns)
        gemm_panel<T, 1>(rows, depth, a, b.data + j, b.stride, c.data + j, c.stride, accumulate);
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
