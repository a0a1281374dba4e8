#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/consumer_thread.cuh"
#include "csrc/attention/sm90/backward/gradient_rows.cuh"
#include "csrc/attention/sm90/backward/hand_over.cuh"

// Stores dK and dV of the 64 keys of a warpgroup, or hands them over to be added up.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardEpilogue {
    unsigned lane;
    const KeyGradients& gradients;
    int64_t rows[2];  // indices of the thread's two rows in [batch, length, row_heads]
    bool exist[2], visible[2];

    __device__ __forceinline__ BackwardEpilogue(const BackwardArguments& args, const BackwardWorkItem& work,
                                                ConsumerThread thread)
        : gradients(args.gradients.of(work.is_final)) {
        const int first_key = thread.warpgroup * 64 + thread.row();
        lane = thread.index() % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = first_key + 8 * r, key = work.key + at;
            rows[r] = (int64_t{work.example} * gradients.length + key) * gradients.row_heads + work.key_head;
            exist[r] = key < work.end_key;
            visible[r] = work.visible[at / 32] >> at % 32 & 1;
        }
    }

    template <int kCount>
    __device__ __forceinline__ void store(const float (&gradient)[kCount], void* to, int dim, float scale) const {
        const GradientRows<typename Config::Element> out{
            to, gradients.f32, dim, lane, {rows[0], rows[1]}, {exist[0], exist[1]}};
#pragma unroll
        for (int i = 0; i < kCount; i += 16) {
            float part[16];
#pragma unroll
            for (int j = 0; j < 16; ++j)
                part[j] = visible[j / 2 % 2] ? gradient[i + j] * scale : 0.f;
            out.store(part, i * 2);
        }
    }

    // Numbers are not multiplied by zero: gradients of keys that no query sees may be NaN.
    template <int kCount>
    __device__ __forceinline__ void hand_over(BackwardMemory<Config> memory, ConsumerThread thread,
                                              const float (&gradient)[kCount], float scale) const {
        hand_over_gradient<kCount>(
            memory, thread, [&](int i) { return visible[i / 2 % 2] ? gradient[i] * scale : 0.f; });
    }
};

}  // namespace jaxmagi::sm90
