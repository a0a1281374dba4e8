#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/consumer_thread.cuh"
#include "csrc/attention/sm90/logits.cuh"
#include "csrc/common/sm90/bits.cuh"

// P and dS of a step from its S and dP, each thread on its part of an accumulator of two rows. In transposed logits the
// rows are keys and the columns queries; in those of wide kernels the rows are queries.

namespace jaxmagi::sm90 {

// A bit for each of a thread's logits in its two rows, in order of columns: set if the query sees the key.
struct BackwardVisibleBits {
    uint32_t words[2] = {~0u, ~0u};

    // The bit of register i.
    __device__ __forceinline__ bool operator[](int i) const {
        return words[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1;
    }
};

// log-sum-exp and delta of the queries of registers i and i + 1 (i even), where queries are columns.
struct ColumnStatistics {
    const EightRows* eights;
    int first_column;

    __device__ __forceinline__ float2 lse_log2(int i) const { return pair(eights[i / 4].lse_log2); }
    __device__ __forceinline__ float2 delta(int i) const { return pair(eights[i / 4].delta); }

private:
    __device__ __forceinline__ float2 pair(const float (&numbers)[8]) const {
        return *reinterpret_cast<const float2*>(numbers + first_column);
    }
};

// log-sum-exp or delta. Those of the queries of the first 4 * kPairs registers are read early, so that the loads
// overlap with a product, the others when they are needed.
template <int kPairs> struct EarlyStatistics {
    ColumnStatistics columns;
    float2 pairs[kPairs];

    // kRead is ColumnStatistics::lse_log2 or ColumnStatistics::delta.
    template <auto kRead> __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
            pairs[i] = (columns.*kRead)(4 * i);
    }
    __device__ __forceinline__ float2 lse_log2(int i) const {
        return i / 4 < kPairs ? pairs[i / 4] : columns.lse_log2(i);
    }
    __device__ __forceinline__ float2 delta(int i) const { return i / 4 < kPairs ? pairs[i / 4] : columns.delta(i); }
};

// log-sum-exp and delta of the query of registers i and i + 1 (i even), where queries are rows.
struct RowStatistics {
    float lse[2], row_delta[2];

    __device__ __forceinline__ float2 lse_log2(int i) const { return {lse[i / 2 % 2], lse[i / 2 % 2]}; }
    __device__ __forceinline__ float2 delta(int i) const { return {row_delta[i / 2 % 2], row_delta[i / 2 % 2]}; }
};

// Turns logits into the logarithms, of base 2, of probabilities.
template <int kCount, typename Statistics>
__device__ __forceinline__ void compute_log2_p(float (&logits)[kCount], const Statistics& statistics, float to_log2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
        const float2 lse = statistics.lse_log2(i);
        logits[i] = logits[i] * to_log2 - lse.x;
        logits[i + 1] = logits[i + 1] * to_log2 - lse.y;
    }
}

// Turns the logarithms in registers [kBegin, kEnd) into probabilities.
template <int kBegin, int kEnd, int kCount> __device__ __forceinline__ void exponentiate(float (&log2_p)[kCount]) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i)
        log2_p[i] = exp2_approx(log2_p[i]);
}

// Masks probabilities in the first kProbabilities registers, and logarithms of probabilities in the others.
template <int kProbabilities, int kCount>
__device__ __forceinline__ void apply_mask(float (&p)[kCount], const BackwardVisibleBits& visible) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        p[i] = visible[i] ? p[i] : i < kProbabilities ? 0.f : -INFINITY;
}

// Turns gradients of the probabilities into those of the logits.
template <int kCount, typename Statistics>
__device__ __forceinline__ void compute_ds(float (&dp)[kCount], const float (&p)[kCount],
                                           const Statistics& statistics) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
        const float2 delta = statistics.delta(i);
        dp[i] = p[i] * (dp[i] - delta.x);
        dp[i + 1] = p[i + 1] * (dp[i + 1] - delta.y);
    }
}

// With a soft cap, turns logits into tanh(logits / cap).
template <int kCount> __device__ __forceinline__ void apply_tanh(float (&logits)[kCount], float logit_scale) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        logits[i] = fast_tanh(logits[i] * logit_scale);
}

// P and dS of two logits.
struct ProbabilitiesAndGradients {
    float2 p, ds;
};

// With a soft cap, returns P and dS of two logits, of which tanh(logit / cap) is given.
__device__ __forceinline__ ProbabilitiesAndGradients capped_p_and_ds(float2 tanh, float2 dp, float2 lse_log2,
                                                                     float2 delta, float cap_log2, bool first_visible,
                                                                     bool second_visible) {
    const float2 p{exp2_approx(cap_log2 * tanh.x - lse_log2.x), exp2_approx(cap_log2 * tanh.y - lse_log2.y)};
    const float2 ds{p.x * (1.f - tanh.x * tanh.x) * (dp.x - delta.x), p.y * (1.f - tanh.y * tanh.y) * (dp.y - delta.y)};
    return {{first_visible ? p.x : 0.f, second_visible ? p.y : 0.f},
            {first_visible ? ds.x : 0.f, second_visible ? ds.y : 0.f}};
}

// P and dS of a step from transposed logits: 64 keys of the warpgroup by kRows queries. To be made when the statistics
// of the step are there, before S is waited for.
template <typename Config> struct TransposedSoftmax {
    static constexpr int kCount = Config::kRows / 2;
    using Element = typename Config::Element;
    using RoundedLogits = typename Config::RoundedLogits;
    static_assert(kCount <= 64);
    // Statistics are read before the products after which they are needed are waited for, of as many queries as there
    // are registers for.
    static constexpr int kEarlyPairs = Config::kRows < 128 ? kCount / 4 : 8;
    // So many registers of P are computed before dP is waited for. The exponentials of 128 queries take longer than dP:
    // those of the second half run beside the arithmetic of dS.
    static constexpr int kBeforeDp = Config::kRows < 128 ? kCount : kCount / 2;

    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    ConsumerThread thread;
    unsigned step;
    bool has_masked_rows;  // some query exists and sees no key
    const StepDescriptor& descriptor = memory.descriptor(step);
    bool masked = descriptor.masked or has_masked_rows;
    // With a soft cap both P and dS are masked, otherwise only P.
    BackwardVisibleBits visible = Config::kSoftCap and masked ? visible_bits() : BackwardVisibleBits{};
    EarlyStatistics<kEarlyPairs> early{statistics(), {}};

    // To be called before S is waited for. With a soft cap nothing is computed from S and lse alone.
    __device__ __forceinline__ void load_lse() {
        if constexpr (not Config::kSoftCap)
            early.template load<&ColumnStatistics::lse_log2>();
    }

    // To be called before dP is waited for.
    __device__ __forceinline__ void load_delta() {
        if constexpr (not Config::kSoftCap)
            early.template load<&ColumnStatistics::delta>();
    }

    // Computes as much of P from S as is due before dP is waited for; with a soft cap, only tanh.
    __device__ __forceinline__ void begin_p(float (&p)[kCount]) const {
        if constexpr (Config::kSoftCap) {
            apply_tanh(p, args.logit_scale);
        } else {
            compute_log2_p(p, early, args.logit_scale);
            exponentiate<0, kBeforeDp>(p);
            if (masked)
                apply_mask<kBeforeDp>(p, visible_bits());
        }
    }

    // Computes the rest of P, and dS from dP, and rounds both.
    __device__ __forceinline__ void finish(float (&p)[kCount], float (&dp)[kCount], RoundedLogits& p_operand,
                                           RoundedLogits& ds_operand) const {
        if constexpr (Config::kSoftCap) {
            finish_capped(p, dp, p_operand, ds_operand);
        } else {
            exponentiate<kBeforeDp, kCount>(p);
            compute_ds(dp, p, early);
            round_to_operand<Element>(dp, ds_operand);
            round_to_operand<Element>(p, p_operand);
        }
    }

private:
    // Computes P and dS from tanh and dP. It rounds each pair at once, from the last to the first: in another order
    // ptxas would spill.
    __device__ __forceinline__ void finish_capped(const float (&tanh)[kCount], const float (&dp)[kCount],
                                                  RoundedLogits& p, RoundedLogits& ds) const {
#pragma unroll
        for (int i = kCount - 2; i >= 0; i -= 2) {
            const auto [probabilities, gradients] =
                capped_p_and_ds({tanh[i], tanh[i + 1]}, {dp[i], dp[i + 1]}, statistics().lse_log2(i),
                                statistics().delta(i), args.cap_log2, visible[i], visible[i + 1]);
            p[i / 8][i / 2 % 4] = Element::pack(probabilities.x, probabilities.y);
            ds[i / 8][i / 2 % 4] = Element::pack(gradients.x, gradients.y);
        }
    }

    __device__ __forceinline__ ColumnStatistics statistics() const { return {memory.rows(step), thread.column()}; }

    // A bit for each of the thread's columns: set if the query sees any key at all. The logits of other queries do not
    // count, whatever they are.
    __device__ __forceinline__ static uint32_t visible_columns(const ColumnStatistics& statistics) {
        uint32_t visible = ~0u;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const float2 lse = statistics.lse_log2(4 * i);
            visible &= ~((lse.x == INFINITY ? 1u : 0u) << 2 * i | (lse.y == INFINITY ? 2u : 0u) << 2 * i);
        }
        return visible;
    }

    __device__ __forceinline__ BackwardVisibleBits visible_bits() const {
        const ColumnStatistics queries = statistics();
        const int key = thread.warpgroup * 64 + thread.row();
        const int4 keys = reinterpret_cast<const int4*>(&descriptor)[0];     // key_begin, key_end, lower, upper
        const int2 columns = reinterpret_cast<const int2*>(&descriptor)[2];  // first_column, end_column
        const uint32_t visible = has_masked_rows ? visible_columns(queries) : ~0u;
        BackwardVisibleBits bits;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = key + 8 * r;
            const bool inside = keys.x <= at and at < keys.y;
            const int end = columns_below((inside ? min(columns.y, at + keys.w) : 0) - queries.first_column);
            const int begin = columns_below(max(columns.x, at + keys.z) - queries.first_column);
            bits.words[r] = low_bits(end) & ~low_bits(begin) & visible;
        }
        return bits;
    }
};

// P and dS of a step in a wide kernel: 64 queries by 2 · kCount keys of the warpgroup.
template <typename Config, int kCount> struct WideSoftmax {
    const BackwardArguments& args;
    RowStatistics rows;
    BackwardVisibleBits visible;

    // To be called when the statistics of the step are there, before S is waited for.
    __device__ __forceinline__ WideSoftmax(BackwardMemory<Config> memory, const BackwardArguments& args,
                                           ConsumerThread thread, unsigned step, bool has_masked_rows)
        : args(args) {
        const EightRows* const eights = memory.rows(step) + thread.row() / 8;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            rows.lse[r] = eights[r].lse_log2[thread.row() % 8];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            rows.row_delta[r] = eights[r].delta[thread.row() % 8];
        const StepDescriptor& descriptor = memory.descriptor(step);
        if (descriptor.masked or has_masked_rows)
            visible = visible_bits(descriptor, thread.row(), thread.warpgroup * 2 * kCount + thread.column());
    }

    __device__ __forceinline__ void compute_p(float (&p)[kCount]) const {
        if constexpr (Config::kSoftCap) {
            apply_tanh(p, args.logit_scale);
        } else {
            compute_log2_p(p, rows, args.logit_scale);
            exponentiate<0, kCount>(p);
            apply_mask<kCount>(p, visible);
        }
    }

    // Turns dP into dS and, with a soft cap, tanh into P.
    __device__ __forceinline__ void compute_ds(float (&dp)[kCount], float (&p)[kCount]) const {
        if constexpr (Config::kSoftCap) {
#pragma unroll
            for (int i = 0; i < kCount; i += 2) {
                const auto [probabilities, gradients] =
                    capped_p_and_ds({p[i], p[i + 1]}, {dp[i], dp[i + 1]}, rows.lse_log2(i), rows.delta(i),
                                    args.cap_log2, visible[i], visible[i + 1]);
                p[i] = probabilities.x;
                p[i + 1] = probabilities.y;
                dp[i] = gradients.x;
                dp[i + 1] = gradients.y;
            }
        } else {
            sm90::compute_ds(dp, p, rows);
        }
    }

private:
    // row: the thread's first query in the block; first_column: its first key in the tile.
    __device__ __forceinline__ BackwardVisibleBits visible_bits(const StepDescriptor& descriptor, int row,
                                                                int first_column) const {
        const int4 keys = reinterpret_cast<const int4*>(&descriptor)[0];     // key_begin, key_end, lower, upper
        const int2 columns = reinterpret_cast<const int2*>(&descriptor)[2];  // first_column, end_column
        BackwardVisibleBits bits;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = row + 8 * r;
            const bool inside = columns.x <= at and at < columns.y and rows.lse[r] != INFINITY;
            const int end = columns_below((inside ? min(keys.y, at - keys.z + 1) : 0) - first_column);
            const int begin = columns_below(max(keys.x, at - keys.w + 1) - first_column);
            bits.words[r] = low_bits(end) & ~low_bits(begin);
        }
        return bits;
    }
};

}  // namespace jaxmagi::sm90
