#pragma once

#include "csrc/attention/sm90/backward/consumer.cuh"
#include "csrc/attention/sm90/backward/epilogue.cuh"
#include "csrc/attention/sm90/backward/products.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/store_logits.cuh"

// The consumer warpgroup for blocks of 64 or 128 queries and head dimensions of at most 96. It is called RS because
// the product for dK has dS from registers. dQ is stored while the product for the next S runs. With
// Config::kLateDk the product for dK overlaps with the softmax of the next step; the other kernels have no registers
// to keep its operand for so long.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardConsumerRs {
    using Products = BackwardProducts<Config>;
    using Logits = typename Products::Logits;
    using KeyGradient = typename Products::KeyGradient;
    using ValueGradient = typename Products::ValueGradient;
    using Softmax = TransposedSoftmax<Config>;

    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    ConsumerThread thread;
    Products products{memory, thread.warpgroup};
    unsigned current = 0;  // index of the current step; between work items, of the next one

    // Adds the current step to dK, dV and, through the reducer, to dQ. It begins with P and dS of the step and no
    // product in flight, and ends with P and dS of the next step unless this one is the last of the work item.
    template <bool kLast>
    __device__ __forceinline__ void step(KeyGradient& dk, ValueGradient& dv, Logits& p, Logits& ds) {
        constexpr bool kLateDk = Config::kLateDk and not kLast;
        typename Products::Operand p_operand, ds_operand;
        round_to_operand<typename Config::Element>(p, p_operand);
        round_to_operand<typename Config::Element>(ds, ds_operand);
        store_transposed_ds<Config>(memory.ds(current), thread, ds_operand);
        products.issue_dv(dv, p_operand, current);
        wgmma_commit();
        fence_shared_for_async();
        named_barrier_sync(kLogitsStored, Config::kConsumerThreads);
        typename Products::QueryGradient dq;
        products.issue_dq(dq, current);
        wgmma_commit();
        wgmma_wait<1>();  // dV
        fence_operand(dv);
        thread.release(memory.dout_empty(current));
        if constexpr (not kLateDk) {
            products.issue_dk(dk, ds_operand, current);
            wgmma_commit();
            wgmma_wait<1>();  // dQ
            fence_operand(dq);
        }
        const unsigned previous = current++;
        if constexpr (not kLast) {
            memory.q_full(current).wait(memory.q_parity(current));
            products.issue_qk(p, current);
            wgmma_commit();
        }
        if constexpr (kLateDk) {
            wgmma_wait<1>();  // dQ
            fence_operand(dq);
        }
        store_dq(memory, thread, dq);  // waits for kDqEmpty and arrives at kDqFull
        if constexpr (not kLateDk) {
            wgmma_wait<kLast ? 0 : 1>();  // dK
            fence_operand(dk);
            thread.release(memory.q_empty(previous));
        }
        if constexpr (not kLast) {
            memory.dout_full(current).wait(memory.dout_parity(current));
            const bool has_masked_rows = zero_masked_rows(memory, thread, current);  // waits for kZeroFilled if it has
            products.issue_dov(ds, current);
            wgmma_commit();
            if constexpr (kLateDk) {
                products.issue_dk(dk, ds_operand, previous);
                wgmma_commit();
            }
            const Softmax softmax{memory, args, thread, current, has_masked_rows};
            wgmma_wait<kLateDk ? 2 : 1>();  // S
            fence_operand(p);
            softmax.compute_p(p);
            wgmma_wait<kLateDk ? 1 : 0>();  // dP
            fence_operand(ds);
            softmax.compute_ds(ds, p);
            if constexpr (kLateDk) {
                finish_before_wait(ds);
                wgmma_wait<0>();  // dK
                fence_operand(dk);
                thread.release(memory.q_empty(previous));
            }
        }
    }

    __device__ __forceinline__ void store(const KeyGradient& dk, const ValueGradient& dv, int item) const {
        const BackwardEpilogue<Config> epilogue(args, memory.work_item(item), thread);
        thread.release_keys(memory.kv_empty());
        epilogue.store(dk, args.dk, args.dim, args.scale);
        epilogue.store(dv, args.dv, args.v_dim, 1.f);
    }

private:
    // Keeps the computation of dS before the next wait, so that it overlaps with the product for dK. ptxas would move
    // it behind the wait, but it does not move a store whose condition (almost never true, and harmless) depends on dS.
    __device__ __forceinline__ void finish_before_wait(const Logits& ds) const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < Config::kRows / 2; ++i)
            bits |= __float_as_uint(ds[i]);
        if (bits == 1u)
            memory.done() = 0;
    }
};

}  // namespace jaxmagi::sm90
