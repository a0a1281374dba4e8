#pragma once

#include "csrc/common/sm90/shared.cuh"

// These functions rearrange the accumulators of a warp, or store them to shared memory.
//
// An 8 x 8 matrix of 16-bit numbers lies over the lanes of a warp: lane l holds numbers 2 · (l % 4) + {0, 1} of row l /
// 4.

namespace jaxmagi::sm90 {

// Stores four matrices, one from each register. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(SharedAddress row, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

// Stores the transposes of four matrices. Addresses are those of rows of the transposes.
__device__ __forceinline__ void store_transposed(SharedAddress row, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

// Transposes one matrix within the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t matrix) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

// Transposes 4 x 4 words over a quad, the 4 lanes that share a row of an accumulator: lane t gets the t-th word of
// every lane.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], unsigned lane) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance)
                continue;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? words[i] : words[i + distance], distance);
            (upper ? words[i] : words[i + distance]) = received;
        }
    }
}

}  // namespace jaxmagi::sm90
