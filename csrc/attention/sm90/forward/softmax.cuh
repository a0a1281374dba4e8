#pragma once

#include <cfloat>

#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/attention/sm90/logits.cuh"
#include "csrc/common/sm90/bits.cuh"

// Online softmax of one block of logits (FlashAttention-2, algorithm 1), each thread on its two rows.

namespace jaxmagi::sm90 {

// A thread's part of two rows: references in units of log 2, far below any logit as long as nothing was seen.
struct RowState {
    float reference[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0.f, 0.f}, scale[2];
};

// A bit for each of a thread's logits in one row of a block, in order of columns: whether the row sees it.
template <int kCount> struct VisibleBits {
    static constexpr int kWords = (kCount / 2 + 31) / 32;
    uint32_t words[2][kWords];

    __device__ __forceinline__ void add(const VisibleBits& others) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int w = 0; w < kWords; ++w)
                words[r][w] |= others.words[r][w];
    }
};

// row: the thread's first one; positions have 1 << pack_shift rows.
template <int kCount>
__device__ __forceinline__ VisibleBits<kCount> visible_bits(const BlockMessage& message, int row, int pack_shift,
                                                            int first_column) {
    const int4 rows = reinterpret_cast<const int4*>(&message)[0];     // row_begin, row_end, lower, upper
    const int2 columns = reinterpret_cast<const int2*>(&message)[2];  // first_column, end_column
    VisibleBits<kCount> bits;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int at = (row + 8 * r) >> pack_shift;
        const bool inside = rows.x <= at and at < rows.y;
        const int end = columns_below((inside ? min(columns.y, at + rows.w) : 0) - first_column);
        const int begin = columns_below(max(columns.x, at + rows.z) - first_column);
#pragma unroll
        for (int w = 0; w < VisibleBits<kCount>::kWords; ++w)
            bits.words[r][w] = low_bits(end - 32 * w) & ~low_bits(begin - 32 * w);
    }
    return bits;
}

template <int kCount> __device__ __forceinline__ void hide(float (&logits)[kCount], const VisibleBits<kCount>& seen) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int r = i / 2 % 2, bit = i / 4 * 2 + i % 2;
        if ((seen.words[r][bit / 32] & 1u << bit % 32) == 0)
            logits[i] = -INFINITY;
    }
}

template <int kCount>
__device__ __forceinline__ void cap_logits(float (&logits)[kCount], float logit_scale, float cap_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        logits[i] = cap_log2 * fast_tanh(logits[i] * logit_scale);
}

__device__ __forceinline__ float over_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float over_quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Of a thread's part of a row; 0 if all are negative. Positive numbers are ordered as their bits are, and the maximum
// of three integers is one instruction.
template <int kCount> __device__ __forceinline__ float largest_positive_logit(const float (&logits)[kCount], int r) {
    int largest = 0;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4)
        largest = __vimax3_s32(largest, __float_as_int(logits[i]), __float_as_int(logits[i + 1]));
    return __int_as_float(largest);
}

// Of negative numbers, which are ordered against their bits.
template <int kCount> __device__ __forceinline__ float largest_negative_logit(const float (&logits)[kCount], int r) {
    uint32_t smallest = __float_as_uint(-INFINITY);
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4)
        smallest = __vimin3_u32(smallest, __float_as_uint(logits[i]), __float_as_uint(logits[i + 1]));
    return __uint_as_float(smallest);
}

// Whether the reference of one row of the warp is too far behind its largest logit.
__device__ __forceinline__ bool is_behind(const float (&largest)[2], const RowState& rows, float to_log2) {
    constexpr float kMaxLag = 8.f;
    const bool first = largest[0] * to_log2 - rows.reference[0] > kMaxLag;
    const bool second = largest[1] * to_log2 - rows.reference[1] > kMaxLag;
    return __any_sync(~0u, first or second);
}

// The reference, relative to which probabilities are taken, follows the largest logit only when a row of the warp is
// more than 2^8 behind: until then probabilities of up to 256 do as well, and scaling the output is saved
// (FlashAttention-4). Rows without a positive logit count as 0 at first, and are looked at again before anything moves.
// Returns whether it moved; then the output has to be multiplied with rows.scale. `to_log2` turns logits into units of
// log 2.
template <int kCount>
__device__ __forceinline__ bool move_references(const float (&logits)[kCount], RowState& rows, float to_log2) {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        largest[r] = over_quad_max(largest_positive_logit(logits, r));
    if (not is_behind(largest, rows, to_log2))
        return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (__any_sync(~0u, largest[r] == 0.f)) {
            const float negative = over_quad_max(largest_negative_logit(logits, r));
            largest[r] = largest[r] == 0.f ? negative : largest[r];
        }
    }
    if (not is_behind(largest, rows, to_log2))
        return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float reference = fmaxf(rows.reference[r], largest[r] * to_log2);
        rows.scale[r] = exp2_approx(rows.reference[r] - reference);
        rows.sum[r] *= rows.scale[r];
        rows.reference[r] = reference;
    }
    return true;
}

// Logits become probabilities.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&logits)[kCount], RowState& rows, float to_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4) {
            logits[i] = exp2_approx(logits[i] * to_log2 - rows.reference[r]);
            logits[i + 1] = exp2_approx(logits[i + 1] * to_log2 - rows.reference[r]);
        }
        float sum = 0.f;
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4)
            sum += logits[i] + logits[i + 1];
        rows.sum[r] += sum;
    }
}

template <int kCount> __device__ __forceinline__ void scale_rows(float (&rows)[kCount], const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        rows[i] *= scale[i / 2 % 2];
}

}  // namespace jaxmagi::sm90
