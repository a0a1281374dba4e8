#pragma once

#include "csrc/attention/sm90/backward/consumer.cuh"

// A consumer warpgroup for blocks of 80 queries and a head dimension of 128. More queries share what a step waits for,
// but their logits take registers. So gradients of logits leave them once they are in shared memory, where dK has its
// operand too, and dQ is handed over before the next logits take its place.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardSsConsumer : BackwardConsumer<Config, BackwardSsConsumer<Config>> {
    using Base = BackwardConsumer<Config, BackwardSsConsumer<Config>>;
    using typename Base::Element, typename Base::Logits, typename Base::Operand;
    using typename Base::KeyGradient, typename Base::ValueGradient, typename Base::QueryGradient;
    using Base::memory, Base::warpgroup, Base::step, Base::kUnused;

    __device__ __forceinline__ void advance(KeyGradient& dk, ValueGradient& dv, Logits& p, Logits& ds) {
        begin_sums(dk, dv, p, ds);
        ++step;
        begin_logits(p);
        wgmma_commit();
        Base::template finish_dk<1>(dk, step - 1);
        const bool has_blind_rows = await_dout();
        begin_dp(ds);
        wgmma_commit();
        Base::template to_gradients<0>(p, ds, has_blind_rows);
    }

private:
    friend Base;
    using Base::await_dout, Base::begin_dp, Base::begin_logits, Base::begin_sums;

    // Transposed: a panel of the columns by all queries.
    __device__ __forceinline__ void begin_dq(QueryGradient& dq) const {
        const SwizzledOperand k(memory.k() + warpgroup * Config::kKeys * kPanelRowBytes, kUnused);
        const SwizzledOperand ds(memory.logits(step), kUnused);
        fence_operand(dq);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kKeys / 16; ++i)
            Wgmma<Element, Config::kRows>::template mma<1, 0>(
                dq, k.at(i * 16 * kPanelRowBytes), ds.at(i / 4 * Config::kRows * kPanelRowBytes + i % 4 * 32), i != 0);
        wgmma_commit();
    }

    // From the warpgroup's own panel of gradients of logits.
    __device__ __forceinline__ void begin_dk(KeyGradient& dk, const Operand&, unsigned of) const {
        const SwizzledOperand ds(memory.logits(of) + warpgroup * Config::kRows * kPanelRowBytes, kUnused);
        const SwizzledOperand q(memory.q(of), Config::kRows * kPanelRowBytes);
        fence_operand(dk);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kDim>::template mma<1, 1>(dk, ds.at(i * 16 * kPanelRowBytes),
                                                             q.at(i * 16 * kPanelRowBytes), true);
        wgmma_commit();
    }
};

}  // namespace jaxmagi::sm90
