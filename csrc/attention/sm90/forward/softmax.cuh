#pragma once

#include <cfloat>

#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/attention/sm90/logits.cuh"
#include "csrc/common/sm90/bits.cuh"

// Online softmax of one block of logits (FlashAttention-2, algorithm 1), each thread on its two rows.

namespace jaxmagi::sm90 {

// The softmax state of a thread's two rows. Probabilities are relative to 2^row_max. The rescale is lazy
// (FlashAttention-4): row_max, in units of log 2, is the maximum at the last rescale, and the true maximum may be up to
// kRescaleThreshold larger. It is far below any logit until a key is visible. row_sum covers only the columns of this
// thread; the epilogue adds up the quad.
struct RowState {
    float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0.f, 0.f}, correction[2];
};

// A bit for each of a thread's logits in one row of a block, in order of columns: set if the row sees the key.
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

// Returns the bits of a thread whose first row is `row`; positions have 1 << pack_shift rows.
template <int kCount>
__device__ __forceinline__ VisibleBits<kCount> visible_bits(const BlockDescriptor& descriptor, int row, int pack_shift,
                                                            int first_column) {
    const int4 rows = reinterpret_cast<const int4*>(&descriptor)[0];     // row_begin, row_end, lower, upper
    const int2 columns = reinterpret_cast<const int2*>(&descriptor)[2];  // first_column, end_column
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

template <int kCount>
__device__ __forceinline__ void apply_mask(float (&logits)[kCount], const VisibleBits<kCount>& visible) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int r = i / 2 % 2, bit = i / 4 * 2 + i % 2;
        if ((visible.words[r][bit / 32] & 1u << bit % 32) == 0)
            logits[i] = -INFINITY;
    }
}

template <int kCount>
__device__ __forceinline__ void cap_logits(float (&logits)[kCount], float logit_scale, float cap_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        logits[i] = cap_log2 * fast_tanh(logits[i] * logit_scale);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Returns the maximum of a thread's part of row r, or 0 if all logits are negative. Positive floats are ordered as
// their bits are, and the maximum of three integers is one instruction.
template <int kCount> __device__ __forceinline__ float max_positive_logit(const float (&logits)[kCount], int r) {
    int largest = 0;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4)
        largest = __vimax3_s32(largest, __float_as_int(logits[i]), __float_as_int(logits[i + 1]));
    return __int_as_float(largest);
}

// Returns the maximum of logits that are all negative. Their order is opposite to that of their bits.
template <int kCount> __device__ __forceinline__ float max_negative_logit(const float (&logits)[kCount], int r) {
    uint32_t smallest = __float_as_uint(-INFINITY);
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4)
        smallest = __vimin3_u32(smallest, __float_as_uint(logits[i]), __float_as_uint(logits[i + 1]));
    return __uint_as_float(smallest);
}

// Returns true for the whole warp if in any of its rows the largest logit exceeds row_max by more than the threshold.
__device__ __forceinline__ bool needs_rescale(const float (&largest)[2], const RowState& rows, float to_log2) {
    constexpr float kRescaleThreshold = 8.f;
    const bool first = largest[0] * to_log2 - rows.row_max[0] > kRescaleThreshold;
    const bool second = largest[1] * to_log2 - rows.row_max[1] > kRescaleThreshold;
    return __any_sync(~0u, first or second);
}

// Updates row_max and row_sum only if a row of the warp needs it (lazy rescale, FlashAttention-4): probabilities of up
// to 2^8 do as well, and most blocks do without scaling the output. Returns true if it did; the output so far then has
// to be multiplied by rows.correction. Rows without a positive logit count as 0 at first, and their true maximum is
// computed only if something seems to need a rescale. `to_log2` turns logits into units of log 2.
template <int kCount>
__device__ __forceinline__ bool rescale_if_needed(const float (&logits)[kCount], RowState& rows, float to_log2) {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        largest[r] = quad_max(max_positive_logit(logits, r));
    if (not needs_rescale(largest, rows, to_log2))
        return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (__any_sync(~0u, largest[r] == 0.f)) {
            const float negative = quad_max(max_negative_logit(logits, r));
            largest[r] = largest[r] == 0.f ? negative : largest[r];
        }
    }
    if (not needs_rescale(largest, rows, to_log2))
        return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float row_max = fmaxf(rows.row_max[r], largest[r] * to_log2);
        rows.correction[r] = exp2_approx(rows.row_max[r] - row_max);
        rows.row_sum[r] *= rows.correction[r];
        rows.row_max[r] = row_max;
    }
    return true;
}

// Turns logits into probabilities and adds them to row_sum.
template <int kCount>
__device__ __forceinline__ void compute_p(float (&logits)[kCount], RowState& rows, float to_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4) {
            logits[i] = exp2_approx(logits[i] * to_log2 - rows.row_max[r]);
            logits[i + 1] = exp2_approx(logits[i + 1] * to_log2 - rows.row_max[r]);
        }
        float sum = 0.f;
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4)
            sum += logits[i] + logits[i + 1];
        rows.row_sum[r] += sum;
    }
}

template <int kCount> __device__ __forceinline__ void scale_rows(float (&rows)[kCount], const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        rows[i] *= scale[i / 2 % 2];
}

}  // namespace jaxmagi::sm90
