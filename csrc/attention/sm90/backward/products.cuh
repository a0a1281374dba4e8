#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// The products of a warpgroup for head dimensions of at most 128. Each function fences the accumulator and issues the
// wgmmas of one product; the caller, `step` in consumer_narrow.cuh, waits for the operands, commits, and waits for the
// product.
//
// Each warpgroup has 64 keys of every tile. S and dP are transposed, keys by queries, so that P is an operand from
// registers for the product for dV (FlashAttention-3). dQ sums over all keys of the tile, for which dS of all
// warpgroups goes through shared memory.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardProducts {
    using Element = typename Config::Element;
    using Logits = float[Config::kRows / 2];
    using RoundedLogits = typename Config::RoundedLogits;
    using KeyGradient = float[Config::kDim / 2];
    using ValueGradient = float[Config::kVDim / 2];
    using QueryGradient = float[Config::kRowBlock / 2];  // the warpgroup's part of dQ: 64 columns of a row block
    static constexpr int kNoStride = 16;  // stride of panels, for operands within one panel

    BackwardMemory<Config> memory;
    int warpgroup;

    // S = K · Q
    __device__ __forceinline__ void issue_qk(Logits& s, unsigned step) const {
        const SwizzledOperand k(memory.k() + warpgroup * 64 * kPanelRowBytes, kNoStride), q(memory.q(step), kNoStride);
        issue_over_head_dim<Config::kDim>(s, k, q);
    }

    // dP = V · dO
    __device__ __forceinline__ void issue_dov(Logits& dp, unsigned step) const {
        const SwizzledOperand v(memory.v() + warpgroup * 64 * kPanelRowBytes, kNoStride);
        const SwizzledOperand dout(memory.dout(step), kNoStride);
        issue_over_head_dim<Config::kVDim>(dp, v, dout);
    }

    // dV += P · dO, with P from registers
    __device__ __forceinline__ void issue_dv(ValueGradient& dv, const RoundedLogits& p, unsigned step) const {
        const SwizzledOperand dout(memory.dout(step), Config::kRows * kPanelRowBytes);
        fence_operand(dv);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kVDim>::template mma<1>(dv, p[i], dout.at(i * 16 * kPanelRowBytes), true);
    }

    // dK += dS · Q, with dS from registers
    __device__ __forceinline__ void issue_dk(KeyGradient& dk, const RoundedLogits& ds, unsigned step) const {
        const SwizzledOperand q(memory.q(step), Config::kRows * kPanelRowBytes);
        fence_operand(dk);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kDim>::template mma<1>(dk, ds[i], q.at(i * 16 * kPanelRowBytes), true);
    }

    // dQ = dS · K: with 128 queries (D 64) the warpgroups split the queries, otherwise the head dimension
    __device__ __forceinline__ void issue_dq(QueryGradient& dq, unsigned step) const {
        constexpr bool kByRows = Config::kRows == 128;
        const SwizzledOperand ds(memory.ds(step) + (kByRows ? warpgroup * 64 * kPanelRowBytes : 0), kNoStride);
        const SwizzledOperand k(memory.k() + (kByRows ? 0 : warpgroup * Config::kKeys * kPanelRowBytes), kNoStride);
        fence_operand(dq);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kKeys / 16; ++i)
            Wgmma<Element, 64>::template mma<0, 1>(dq, ds.at(i / 4 * Config::kRows * kPanelRowBytes + i % 4 * 32),
                                                   k.at(i * 16 * kPanelRowBytes), i != 0);
    }

    // dQ = dS · K, transposed: 64 columns (rows of the accumulator) of all queries
    __device__ __forceinline__ void issue_transposed_dq(QueryGradient& dq, unsigned step) const {
        const SwizzledOperand k(memory.k() + warpgroup * Config::kKeys * kPanelRowBytes, kNoStride);
        const SwizzledOperand ds(memory.ds(step), kNoStride);
        fence_operand(dq);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kKeys / 16; ++i)
            Wgmma<Element, Config::kRows>::template mma<1, 0>(
                dq, k.at(i * 16 * kPanelRowBytes), ds.at(i / 4 * Config::kRows * kPanelRowBytes + i % 4 * 32), i != 0);
    }

private:
    template <int kColumns>
    __device__ __forceinline__ static void issue_over_head_dim(Logits& logits, const SwizzledOperand& keys,
                                                               const SwizzledOperand& queries) {
        fence_operand(logits);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i) {
            const int panel = i / 4, inside = i % 4 * 32;
            Wgmma<Element, Config::kRows>::template mma<0, 0>(
                logits, keys.at(panel * Config::kKeys * kPanelRowBytes + inside),
                queries.at(panel * Config::kRows * kPanelRowBytes + inside), i != 0);
        }
    }
};

}  // namespace jaxmagi::sm90
