#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/gradient_rows.cuh"

// Stores the gradients of keys and values of a tile.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardEpilogue {
    unsigned lane;
    bool f32;
    int64_t rows[2];  // numbers of the thread's two rows in [batch, kv_len, kv_heads]
    bool exist[2], seen[2];

    // first_key: of the thread, in the tile.
    __device__ __forceinline__ BackwardEpilogue(const BackwardArguments& args, const KeyTileMessage& tile,
                                                int first_key, unsigned lane)
        : lane(lane), f32(args.gradients_f32) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = first_key + 8 * r, key = tile.key + at;
            rows[r] = (int64_t{tile.example} * args.kv_len + key) * args.kv_heads + tile.key_head;
            exist[r] = key < args.kv_len;
            seen[r] = tile.seen[at / 32] >> at % 32 & 1;
        }
    }

    template <int kCount>
    __device__ __forceinline__ void store(const float (&gradient)[kCount], void* to, int dim, float scale) const {
        const GradientRows<typename Config::Element> out{to, f32, dim, lane, {rows[0], rows[1]}, {exist[0], exist[1]}};
#pragma unroll
        for (int i = 0; i < kCount; i += 16) {
            float part[16];
#pragma unroll
            for (int j = 0; j < 16; ++j)
                part[j] = seen[j / 2 % 2] ? gradient[i + j] * scale : 0.f;
            out.store(part, i * 2);
        }
    }
};

}  // namespace jaxmagi::sm90
