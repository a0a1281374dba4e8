#pragma once

#include "csrc/common/sm90/element.cuh"
#include "csrc/common/sm90/stmatrix.cuh"

// Stores accumulators of the matrix units as rows of a gradient.

namespace jaxmagi::sm90 {

// The two rows of which a thread has a part, each `dim` numbers long. Only wanted rows are stored.
template <typename Element> struct GradientRows {
    void* to;
    bool f32;
    int dim;
    unsigned lane;
    int64_t first[2];  // index of each row
    bool wanted[2];

    // Stores columns [column, column + 32) from 4 fragments of 8 columns.
    __device__ __forceinline__ void store(const float (&part)[16], int column) const {
        if (f32)
            store_f32(part, column);
        else
            store_16bit(part, column);
    }

private:
    __device__ __forceinline__ void store_f32(const float (&part)[16], int column) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int at = column + 8 * i + static_cast<int>(lane % 4 * 2);
                if (wanted[r] and at < dim)
                    *reinterpret_cast<float2*>(static_cast<float*>(to) + first[r] * dim + at) = {
                        part[4 * i + 2 * r], part[4 * i + 2 * r + 1]};
            }
        }
    }

    // Stores 16 bytes a lane, and so 64 contiguous bytes a quad.
    __device__ __forceinline__ void store_16bit(const float (&part)[16], int column) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = Element::pack(part[4 * i + 2 * r], part[4 * i + 2 * r + 1]);
            transpose_quad(words, lane);
            const int at = column + static_cast<int>(lane % 4 * 8);
            if (wanted[r] and at < dim)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to) + first[r] * dim + at) = {words[0], words[1],
                                                                                              words[2], words[3]};
        }
    }
};

}  // namespace jaxmagi::sm90
