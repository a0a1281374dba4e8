#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/logits.cuh"
#include "csrc/common/sm90/bits.cuh"

// From logits to probabilities and to gradients of logits. Transposed logits: each thread on two keys (rows) and
// kCount / 4 pairs of queries (columns). Others, in functions whose names say so, on two queries and pairs of keys.

namespace jaxmagi::sm90 {

// What a thread needs of the rows, by fragments of 8 columns.
struct ThreadRows {
    const EightRows* fragments;
    int first_column;  // of the thread

    __device__ __forceinline__ float2 lse_log2(int fragment) const { return pair(fragments[fragment].lse_log2); }
    __device__ __forceinline__ float2 delta(int fragment) const { return pair(fragments[fragment].delta); }

private:
    __device__ __forceinline__ float2 pair(const float (&numbers)[8]) const {
        return *reinterpret_cast<const float2*>(numbers + first_column);
    }
};

// A bit for each of a thread's logits in its two rows of the accumulator, in order of columns: whether the query sees
// the key. Rows are keys, or queries where row_bits finds them.
struct SeenBits {
    uint32_t words[2];

    // Of register i.
    __device__ __forceinline__ bool operator[](int i) const {
        return words[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1;
    }
};

// A bit for each pair of a thread's columns: whether the query has logits.
template <int kCount>
__device__ __forceinline__ uint32_t sighted_bits(const ThreadRows& rows) {
    uint32_t sighted = ~0u;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const float2 lse = rows.lse_log2(i);
        sighted &= ~((lse.x == INFINITY ? 1u : 0u) << 2 * i | (lse.y == INFINITY ? 2u : 0u) << 2 * i);
    }
    return sighted;
}

// key: the thread's first one in the tile. Queries without logits, if there are any that exist, see nothing, whatever
// their numbers are.
template <int kCount>
__device__ __forceinline__ SeenBits seen_bits(const StepMessage& message, const ThreadRows& rows, int key,
                                              bool has_blind_rows) {
    static_assert(kCount <= 64);
    const int4 keys = reinterpret_cast<const int4*>(&message)[0];     // key_begin, key_end, lower, upper
    const int2 columns = reinterpret_cast<const int2*>(&message)[2];  // first_column, end_column
    const uint32_t sighted = has_blind_rows ? sighted_bits<kCount>(rows) : ~0u;
    SeenBits bits;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int at = key + 8 * r;
        const bool inside = keys.x <= at and at < keys.y;
        const int end = columns_below((inside ? min(columns.y, at + keys.w) : 0) - rows.first_column);
        const int begin = columns_below(max(columns.x, at + keys.z) - rows.first_column);
        bits.words[r] = low_bits(end) & ~low_bits(begin) & sighted;
    }
    return bits;
}

// Logits become probabilities.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&logits)[kCount], const ThreadRows& rows,
                                             float to_log2) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const float2 lse = rows.lse_log2(i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            logits[4 * i + 2 * r] = exp2_approx(logits[4 * i + 2 * r] * to_log2 - lse.x);
            logits[4 * i + 2 * r + 1] = exp2_approx(logits[4 * i + 2 * r + 1] * to_log2 - lse.y);
        }
    }
}

template <int kCount> __device__ __forceinline__ void hide(float (&p)[kCount], const SeenBits& seen) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        p[i] = seen[i] ? p[i] : 0.f;
}

// Gradients of the probabilities become those of the logits.
template <int kCount>
__device__ __forceinline__ void differentiate(float (&dp)[kCount], const float (&p)[kCount],
                                              const ThreadRows& rows) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const float2 delta = rows.delta(i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            dp[4 * i + 2 * r] = p[4 * i + 2 * r] * (dp[4 * i + 2 * r] - delta.x);
            dp[4 * i + 2 * r + 1] = p[4 * i + 2 * r + 1] * (dp[4 * i + 2 * r + 1] - delta.y);
        }
    }
}

// With a soft cap: logits become tanh(logits / cap).
template <int kCount> __device__ __forceinline__ void saturate(float (&logits)[kCount], float logit_scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        logits[i] = fast_tanh(logits[i] * logit_scale);
}

// With a soft cap: saturated logits become probabilities, and gradients of the probabilities those of the logits.
template <int kCount>
__device__ __forceinline__ void differentiate_capped(float (&dp)[kCount], float (&saturated)[kCount],
                                                     const ThreadRows& rows, const SeenBits& seen,
                                                     float cap_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float2 lse = rows.lse_log2(i / 4), delta = rows.delta(i / 4);
        const float t = saturated[i], p = exp2_approx(cap_log2 * t - (i % 2 ? lse.y : lse.x));
        const float gradient = p * (1.f - t * t) * (dp[i] - (i % 2 ? delta.y : delta.x));
        saturated[i] = seen[i] ? p : 0.f;
        dp[i] = seen[i] ? gradient : 0.f;
    }
}

// row: the thread's first query in the block; first_column: the first key in the tile.
__device__ __forceinline__ SeenBits row_bits(const StepMessage& message, const float (&lse_log2)[2], int row,
                                             int first_column) {
    const int4 keys = reinterpret_cast<const int4*>(&message)[0];     // key_begin, key_end, lower, upper
    const int2 columns = reinterpret_cast<const int2*>(&message)[2];  // first_column, end_column
    SeenBits bits;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int at = row + 8 * r;
        const bool inside = columns.x <= at and at < columns.y and lse_log2[r] != INFINITY;
        const int end = columns_below((inside ? min(keys.y, at - keys.z + 1) : 0) - first_column);
        const int begin = columns_below(max(keys.x, at - keys.w + 1) - first_column);
        bits.words[r] = low_bits(end) & ~low_bits(begin);
    }
    return bits;
}

template <int kCount>
__device__ __forceinline__ void exponentiate_rows(float (&logits)[kCount], const float (&lse_log2)[2],
                                                  const SeenBits& seen, float to_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float p = exp2_approx(logits[i] * to_log2 - lse_log2[i / 2 % 2]);
        logits[i] = seen[i] ? p : 0.f;
    }
}

template <int kCount>
__device__ __forceinline__ void differentiate_rows(float (&dp)[kCount], const float (&p)[kCount],
                                                   const float (&delta)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        dp[i] = p[i] * (dp[i] - delta[i / 2 % 2]);
}

template <int kCount>
__device__ __forceinline__ void differentiate_capped_rows(float (&dp)[kCount], float (&saturated)[kCount],
                                                          const float (&lse_log2)[2], const float (&delta)[2],
                                                          const SeenBits& seen, float cap_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int r = i / 2 % 2;
        const float t = saturated[i], p = exp2_approx(cap_log2 * t - lse_log2[r]);
        const float gradient = p * (1.f - t * t) * (dp[i] - delta[r]);
        saturated[i] = seen[i] ? p : 0.f;
        dp[i] = seen[i] ? gradient : 0.f;
    }
}

}  // namespace jaxmagi::sm90
