#pragma once

#include <cstdint>

namespace jaxmagi::sm90 {

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
