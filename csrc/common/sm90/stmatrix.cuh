#pragma once

#include "csrc/common/sm90/shared.cuh"

// 8 x 8 matrices of 16-bit numbers over the lanes of a warp: lane l holds numbers 2 · (l % 4) + {0, 1} of row l / 4.

namespace jaxmagi::sm90 {

// Stores four, one a register. Lane l gives the place of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(SharedAddress row, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

// The same, transposed: rows are those of the transposed matrices.
__device__ __forceinline__ void store_transposed(SharedAddress row, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

__device__ __forceinline__ uint32_t transpose_matrix(uint32_t matrix) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

}  // namespace jaxmagi::sm90
