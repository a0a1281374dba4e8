#pragma once

#include <cstdint>

namespace jaxmagi::sm90 {

// Returns the lowest `count` bits: none for a negative count, all from 32 on.
__device__ __forceinline__ uint32_t low_bits(int count) {
    uint32_t bit;
    asm("shl.b32 %0, 1, %1;" : "=r"(bit) : "r"(max(count, 0)));  // shl gives 0 from 32 on
    return bit - 1;
}

}  // namespace jaxmagi::sm90
