#pragma once

#include "csrc/common/sm90/shared.cuh"

namespace jaxmagi::sm90 {

// Four 8 x 8 matrices of 16-bit numbers, one a register: lane l holds numbers 2 · (l % 4) + {0, 1} of row l / 4. They are
// stored transposed: number l / 4 of rows 2 · (l % 4) + {0, 1}. Lane l gives the place of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_transposed(SharedAddress row, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

}  // namespace jaxmagi::sm90
