#pragma once

#include "csrc/attention/sm90/backward/consumer.cuh"
#include "csrc/attention/sm90/backward/epilogue.cuh"
#include "csrc/attention/sm90/backward/products.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/store_logits.cuh"

// The consumer warpgroup of narrow kernels, with a head dimension of at most 128. The products for S, dP and dQ take
// nearly all of the bandwidth of shared memory. Those for dV and dK have P and dS from registers and leave half of it
// to others: a part of dV runs while the warpgroups wait for each other's dS, the rest and dK while dQ is stored, read
// by the reducer and sent. So dQ has left when S of the next step comes.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardConsumerNarrow {
    using Element = typename Config::Element;
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
    // product in flight, and ends with those of the next step unless this one is the last of the work item.
    template <bool kLast>
    __device__ __forceinline__ void step(KeyGradient& dk, ValueGradient& dv, Logits& p, Logits& ds) {
        constexpr int kAll = Config::kRows / 16, kFirst = kAll / 2;  // queries, by 16
        typename Products::Operand p_operand, ds_operand;
        round_to_operand<Element>(ds, ds_operand);
        round_to_operand<Element>(p, p_operand);
        store_transposed_ds<Config>(memory.ds(current), thread, ds_operand);
        products.template issue_dv<0, kFirst>(dv, p_operand, current);
        wgmma_commit();
        fence_shared_for_async();
        named_barrier_sync(kLogitsStored, Config::kConsumerThreads);
        typename Products::QueryGradient own_dq;
        auto& dq = query_gradient(p, own_dq);
        if constexpr (Config::kTransposedDq)
            products.issue_transposed_dq(dq, current);
        else
            products.issue_dq(dq, current);
        wgmma_commit();
        products.template issue_dv<kFirst, kAll>(dv, p_operand, current);
        wgmma_commit();
        wgmma_wait<1>();  // dQ
        fence_operand(dq);
        hand_over_dq(memory, thread, dq);  // waits for kPartEmpty and arrives at kPartFull
        products.issue_dk(dk, ds_operand, current);
        wgmma_commit();
        wgmma_wait<1>();  // dV
        fence_operand(dv);
        thread.release(memory.dout_empty(current));
        wgmma_wait<0>();  // dK
        fence_operand(dk);
        thread.release(memory.q_empty(current));
        ++current;
        if constexpr (not kLast) {
            issue_logits(p);
            finish_logits(p, ds);
        }
    }

    __device__ __forceinline__ void issue_logits(Logits& p) const {
        memory.q_full(current).wait(memory.q_parity(current));
        products.issue_qk(p, current);
        wgmma_commit();
    }

    // Computes P and dS of the current step, for which the product for S was issued.
    __device__ __forceinline__ void finish_logits(Logits& p, Logits& ds) const {
        memory.dout_full(current).wait(memory.dout_parity(current));
        const bool has_masked_rows = zero_masked_rows(memory, thread, current);  // waits for kZeroFilled if it has
        products.issue_dov(ds, current);
        wgmma_commit();
        Softmax softmax{memory, args, thread, current, has_masked_rows};
        wgmma_wait<1>();  // S
        fence_operand(p);
        softmax.compute_p(p);
        softmax.load_delta();
        wgmma_wait<0>();  // dP
        fence_operand(ds);
        softmax.compute_ds(ds, p);
    }

    // Transposed dQ takes the registers of P: ptxas finds no others for it.
    __device__ __forceinline__ static auto& query_gradient(Logits& p, typename Products::QueryGradient& own) {
        if constexpr (Config::kTransposedDq)
            return p;
        else
            return own;
    }

    __device__ __forceinline__ void store(const KeyGradient& dk, const ValueGradient& dv, int item) const {
        const BackwardEpilogue<Config> epilogue(args, memory.work_item(item), thread);
        thread.release_keys(memory.kv_empty());
        if (not memory.schedule().adds_gradients()) {
            epilogue.store(dk, epilogue.gradients.dk, args.dim, args.scale);
            epilogue.store(dv, epilogue.gradients.dv, args.v_dim, 1.f);
        } else {
            epilogue.hand_over(memory, thread, dk, args.scale);
            epilogue.hand_over(memory, thread, dv, 1.f);
        }
    }
};

}  // namespace jaxmagi::sm90
