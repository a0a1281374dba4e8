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

// Computes a block [kRows, kVecs vectors] of C, which stays in registers over the whole depth: each step loads kVecs
// vectors of B and broadcasts kRows scalars of A.
template <typename T, int kRows, int kVecs>
inline void gemm_block(int depth, Factor<T> a, Matrix<const T> b, Matrix<T> c, bool accumulate) {
    vec_t<T> sum[kRows][kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j)
            sum[i][j] = accumulate ? load(c.data + i * c.stride + j * kLanes<T>) : vec_t<T>{};
    for (int k = 0; k < depth; ++k) {
        vec_t<T> right[kVecs];
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j)
            right[j] = load(b.data + k * b.stride + j * kLanes<T>);
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
            store(c.data + i * c.stride + j * kLanes<T>, sum[i][j]);
}

// Computes a block of at most kRows rows.
template <typename T, int kRows, int kVecs>
inline void gemm_tail(int rows, int depth, Factor<T> a, Matrix<const T> b, Matrix<T> c, bool accumulate) {
    if constexpr (kRows > 0) {
        if (rows == kRows)
            gemm_block<T, kRows, kVecs>(depth, a, b, c, accumulate);
        else
            gemm_tail<T, kRows - 1, kVecs>(rows, depth, a, b, c, accumulate);
    }
}

// Computes kVecs vectors of columns of C.
template <typename T, int kVecs>
inline void gemm_panel(int rows, int depth, Factor<T> a, Matrix<const T> b, Matrix<T> c, bool accumulate) {
    for (; rows >= kBlockRows; rows -= kBlockRows) {
        gemm_block<T, kBlockRows, kVecs>(depth, a, b, c, accumulate);
        a.data += kBlockRows * a.row;
        c.data += kBlockRows * c.stride;
    }
    gemm_tail<T, kBlockRows - 1, kVecs>(rows, depth, a, b, c, accumulate);
}

// C = A B, or C += A B: [rows, depth] x [depth, columns], columns a multiple of the vector width.
template <typename T>
inline void gemm(int rows, int64_t columns, int depth, Factor<T> a, Matrix<const T> b, Matrix<T> c, bool accumulate) {
    int64_t j = 0;
    for (; j + 2 * kLanes<T> <= columns; j += 2 * kLanes<T>)
        gemm_panel<T, 2>(rows, depth, a, {b.data + j, b.stride}, {c.data + j, c.stride}, accumulate);
    if (j < columns)
        gemm_panel<T, 1>(rows, depth, a, {b.data + j, b.stride}, {c.data + j, c.stride}, accumulate);
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
