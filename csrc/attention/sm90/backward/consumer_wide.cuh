#pragma once

#include "csrc/attention/sm90/backward/consumer.cuh"
#include "csrc/attention/sm90/backward/epilogue_wide.cuh"
#include "csrc/attention/sm90/backward/hand_over.cuh"
#include "csrc/attention/sm90/backward/products_wide.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/store_logits.cuh"
#include "csrc/attention/sm90/backward/zero_masked.cuh"

// The consumer warpgroup for head dimensions above 128, where dK and dV of 64 keys would not fit into its registers.
// Each warpgroup has S and dP of 32 keys, but dK and dV, transposed, of all keys of the tile and of some panels of the
// head dimension. P and dS go through shared memory.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardConsumerWide {
    using Products = BackwardProductsWide<Config>;
    using Logits = typename Products::Logits;
    using KeyGradient = typename Products::KeyGradient;
    using ValueGradient = typename Products::ValueGradient;
    using Softmax = WideSoftmax<Config, Products::kLogitsKeys / 2>;
    // Registers allow the next S while the products for dV, dK and dQ run.
    static constexpr bool kEarlyLogits = Config::kConsumers == 2;

    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    ConsumerThread thread;
    Products products{memory, thread.warpgroup};
    unsigned current = 0;  // index of the current step; between work items, of the next one

    // Adds up dK and dV over the steps of a work item.
    __device__ __forceinline__ void run_steps(KeyGradient& dk, ValueGradient& dv, int num_steps) {
        Logits p, ds;
        issue_logits(p);
        finish_logits(p, ds);
#pragma unroll 1
        for (int left = num_steps - 1; left > 0; --left)
            step<false>(dk, dv, p, ds);
        step<true>(dk, dv, p, ds);
    }

    // Adds the current step to dK, dV and, through the reducer, to dQ. It begins with P and dS of the step and no
    // product in flight, and ends with P and dS of the next step unless this one is the last of the work item.
    template <bool kLast>
    __device__ __forceinline__ void step(KeyGradient& dk, ValueGradient& dv, Logits& p, Logits& ds) {
        constexpr bool kEarly = kEarlyLogits and not kLast, kLate = not kEarlyLogits and not kLast;
        named_barrier_sync(kLogitsRead, Config::kConsumerThreads);
        store_wide_logits<Config>(memory.p(), thread, p);
        store_wide_logits<Config>(memory.ds(current), thread, ds);
        fence_shared_for_async();
        named_barrier_sync(kLogitsStored, Config::kConsumerThreads);
        typename Products::QueryGradient dq;
        fence_operand(dv);
        fence_operand(dk);
        fence_operand(dq);
        wgmma_fence();
        products.issue_dv(dv, current);
        wgmma_commit();
        products.issue_dk(dk, current);
        wgmma_commit();
        products.issue_dq(dq, current);
        wgmma_commit();
        const unsigned previous = current++;
        if constexpr (kEarly)
            issue_logits(p);
        wgmma_wait<kEarly ? 3 : 2>();  // dV
        fence_operand(dv);
        thread.release(memory.dout_empty(previous));
        wgmma_wait<kEarly ? 2 : 1>();  // dK
        fence_operand(dk);
        thread.release(memory.q_empty(previous));
        wgmma_wait<kEarly ? 1 : 0>();  // dQ
        fence_operand(dq);
#pragma unroll
        for (int i = 0; i < Products::kPanels; ++i)
            hand_over_dq(memory, thread, dq[i]);  // waits for kPartEmpty and arrives at kPartFull
        if constexpr (kLate)
            issue_logits(p);
        if constexpr (not kLast)
            finish_logits(p, ds);
    }

    __device__ __forceinline__ void issue_logits(Logits& p) const {
        memory.q_full(current).wait(memory.q_parity(current));
        products.issue_qk(p, current);
        wgmma_commit();
    }

    // Computes P and dS of the current step, for which the product for S was issued.
    __device__ __forceinline__ void finish_logits(Logits& p, Logits& ds) const {
        memory.dout_full(current).wait(memory.dout_parity(current));
        const bool has_masked_rows = memory.rows(current)->block_has_masked_rows != 0;
        zero_masked_rows(memory, thread, current, has_masked_rows);
        products.issue_dov(ds, current);
        wgmma_commit();
        const Softmax softmax{memory, args, thread, current, has_masked_rows};
        wgmma_wait<1>();  // S
        fence_operand(p);
        softmax.compute_p(p);
        wgmma_wait<0>();  // dP
        fence_operand(ds);
        softmax.compute_ds(ds, p);
    }

    __device__ __forceinline__ void store(const KeyGradient& dk, const ValueGradient& dv, int item) const {
        thread.arrive_by_warps(memory.kv_empty());
        const BackwardEpilogueWide<Config> epilogue(args, memory.work_item(item), thread.index());
        if constexpr (Config::kCanAddGradients)
            if (memory.schedule().adds_gradients())
                return hand_over(epilogue, dk, dv);
#pragma unroll
        for (int i = 0; i < Products::kPanels; ++i)
            epilogue.store(dk[i], epilogue.gradients.dk, args.dim, products.panel(i), args.scale);
#pragma unroll
        for (int i = 0; i < Products::kVPanels; ++i)
            epilogue.store(dv[i], epilogue.gradients.dv, args.v_dim, products.v_panel(i), 1.f);
    }

    __device__ __forceinline__ void hand_over(const BackwardEpilogueWide<Config>& epilogue, const KeyGradient& dk,
                                              const ValueGradient& dv) const {
#pragma unroll
        for (int i = 0; i < Products::kPanels; ++i)
            epilogue.hand_over(memory, thread, dk[i], args.scale);
#pragma unroll
        for (int i = 0; i < Products::kVPanels; ++i)
            epilogue.hand_over(memory, thread, dv[i], 1.f);
    }
};

}  // namespace jaxmagi::sm90
