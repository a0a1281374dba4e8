#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/hand_over.cuh"
#include "csrc/common/sm90/stmatrix.cuh"

// Stores dK and dV of a tile, or hands them over to be added up, from transposed accumulators: 64 rows of the head
// dimension by all keys.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardEpilogueWide {
    using Element = typename Config::Element;
    using Gradient = float[Config::kKeys / 2];

    const BackwardWorkItem& work;
    const KeyGradients& gradients;
    int num_keys;       // of the tile
    int row, lane;      // first row of the warp; lane in the warp
    int64_t first_row;  // index of the tile's first key in [batch, length, row_heads]

    __device__ __forceinline__ BackwardEpilogueWide(const BackwardArguments& args, const BackwardWorkItem& work,
                                                    int thread)
        : work(work), gradients(args.gradients.of(work.is_final)), num_keys(work.end_key - work.key),
          row(thread / 32 * 16), lane(thread % 32),
          first_row((int64_t{work.example} * gradients.length + work.key) * gradients.row_heads + work.key_head) {}

    __device__ __forceinline__ void store(const Gradient& gradient, void* to, int dim, int panel, float scale) const {
        const int column = panel * kPanelColumns + row;
        if (gradients.f32)
            store_f32(gradient, static_cast<float*>(to) + first_row * dim, dim, column, scale);
        else
            store_16bit(gradient, static_cast<uint16_t*>(to) + first_row * dim, dim, column, scale);
    }

    // Numbers are not multiplied by zero: gradients of keys that no query sees may be NaN.
    __device__ __forceinline__ void hand_over(BackwardMemory<Config> memory, ConsumerThread thread,
                                              const Gradient& gradient, float scale) const {
        const int key = lane % 4 * 2;
        hand_over_gradient<Config::kKeys / 2>(memory, thread, [&](int i) {
            return visible_bits(i / 4) >> (key + i % 2) & 1 ? gradient[i] * scale : 0.f;
        });
    }

private:
    __device__ __forceinline__ uint32_t visible_bits(int i) const { return work.visible[i / 4] >> i % 4 * 8; }

    // A lane has columns lane / 4 + {0, 8} of keys 2 · (lane % 4) + {0, 1}: 8 lanes fill a sector.
    __device__ __forceinline__ void store_f32(const Gradient& gradient, float* to, int dim, int first,
                                              float scale) const {
        const int key = lane % 4 * 2, column = first + lane / 4, stride = gradients.row_heads * dim;
#pragma unroll 1
        for (int j = 0; j < 2; ++j) {
            float* at = to + int64_t{key + j} * stride + column;
#pragma unroll
            for (int i = 0; i < Config::kKeys / 8; ++i, at += 8 * stride) {
                const bool visible = visible_bits(i) >> (key + j) & 1, exists = 8 * i + key + j < num_keys;
                const float x = j == 0 ? gradient[4 * i] : gradient[4 * i + 1];
                const float y = j == 0 ? gradient[4 * i + 2] : gradient[4 * i + 3];
                if (exists and column < dim)
                    at[0] = visible ? x * scale : 0.f;
                if (exists and column + 8 < dim)
                    at[8] = visible ? y * scale : 0.f;
            }
        }
    }

    // After transposing, a lane has columns 2 · (lane % 4) + {0, 1} of key lane / 4.
    __device__ __forceinline__ void store_16bit(const Gradient& gradient, uint16_t* to, int dim, int first,
                                                float scale) const {
        const int key = lane / 4, column = first + lane % 4 * 2, stride = gradients.row_heads * dim;
        uint16_t* at = to + int64_t{key} * stride + column;
#pragma unroll
        for (int i = 0; i < Config::kKeys / 8; ++i, at += 8 * stride) {
            const bool visible = visible_bits(i) >> key & 1, exists = 8 * i + key < num_keys;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float x = gradient[4 * i + 2 * r] * scale, y = gradient[4 * i + 2 * r + 1] * scale;
                const uint32_t pair = transpose_matrix(Element::pack(x, y));
                if (exists and column + 8 * r < dim)
                    *reinterpret_cast<uint32_t*>(at + 8 * r) = visible ? pair : 0;
            }
        }
    }
};

}  // namespace jaxmagi::sm90
