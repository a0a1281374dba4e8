#pragma once

#include "csrc/attention/sm90/backward/consumer.cuh"

// A consumer warpgroup for blocks of 64 or 128 queries: dK has its operand from registers. dQ is stored beside the
// product for the next logits.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardRsConsumer : BackwardConsumer<Config, BackwardRsConsumer<Config>> {
    using Base = BackwardConsumer<Config, BackwardRsConsumer<Config>>;
    using typename Base::Element, typename Base::Logits, typename Base::Operand;
    using typename Base::KeyGradient, typename Base::ValueGradient, typename Base::QueryGradient;
    using Base::memory, Base::warpgroup, Base::step, Base::kUnused;

    __device__ __forceinline__ void advance(KeyGradient& dk, ValueGradient& dv, Logits& p, Logits& ds) {
        Operand ds_operand;
        QueryGradient dq;
        begin_dv_and_dq(dq, dv, ds_operand, p, ds);
        if constexpr (not Config::kLateDk) {
            begin_dk(dk, ds_operand, step);
            wgmma_wait<1>();
            fence_operand(dq);
        }
        ++step;
        begin_logits(p);
        wgmma_commit();
        if constexpr (Config::kLateDk) {
            wgmma_wait<1>();
            fence_operand(dq);
        }
        sender().send(dq);
        if constexpr (not Config::kLateDk)
            Base::template finish_dk<1>(dk, step - 1);
        const bool has_blind_rows = await_dout();
        begin_dp(ds);
        wgmma_commit();
        if constexpr (Config::kLateDk)
            begin_dk(dk, ds_operand, step - 1);
        Base::template to_gradients<Config::kLateDk>(p, ds, has_blind_rows);
        if constexpr (Config::kLateDk) {
            finish_before_wait(ds);
            Base::template finish_dk<0>(dk, step - 1);
        }
    }

private:
    friend Base;
    using Base::await_dout, Base::begin_dp, Base::begin_dv_and_dq, Base::begin_logits, Base::sender;

    // The gradients have to be found beside the product that is waited for next. ptxas would move them behind the
    // wait; it does not move a store whose condition (all but never true, and then it does no harm) depends on them.
    __device__ __forceinline__ void finish_before_wait(const Logits& ds) const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < Config::kRows / 2; ++i)
            bits |= __float_as_uint(ds[i]);
        if (bits == 1u)
            memory.done() = 0;
    }

    // 64 queries by 64 columns: with 128 queries those of the warpgroup, otherwise a panel of the columns.
    __device__ __forceinline__ void begin_dq(QueryGradient& dq) const {
        constexpr bool kByRows = Config::kRows == 128;
        const SwizzledOperand ds(memory.logits(step) + (kByRows ? warpgroup * 64 * kPanelRowBytes : 0), kUnused);
        const SwizzledOperand k(memory.k() + (kByRows ? 0 : warpgroup * Config::kKeys * kPanelRowBytes), kUnused);
        fence_operand(dq);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kKeys / 16; ++i)
            Wgmma<Element, 64>::template mma<0, 1>(dq, ds.at(i / 4 * Config::kRows * kPanelRowBytes + i % 4 * 32),
                                                   k.at(i * 16 * kPanelRowBytes), i != 0);
        wgmma_commit();
    }

    __device__ __forceinline__ void begin_dk(KeyGradient& dk, const Operand& ds, unsigned of) const {
        const SwizzledOperand q(memory.q(of), Config::kRows * kPanelRowBytes);
        fence_operand(dk);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kDim>::template mma<1>(dk, ds[i], q.at(i * 16 * kPanelRowBytes), true);
        wgmma_commit();
    }
};

}  // namespace jaxmagi::sm90
