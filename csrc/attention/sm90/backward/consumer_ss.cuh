#pragma once

#include "csrc/attention/sm90/backward/epilogue.cuh"
#include "csrc/attention/sm90/backward/products.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/store_dq.cuh"
#include "csrc/attention/sm90/backward/store_ds.cuh"
#include "csrc/attention/sm90/backward/zero_masked.cuh"

// The consumer warpgroup for blocks of 80 queries and a head dimension of 128. It is called SS because the product for
// dK has both operands in shared memory. More queries share the latencies of a step, but their logits take more
// registers. So dS leaves the registers once it is in shared memory, and dQ is stored before the next logits need its
// registers.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardConsumerSs {
    using Products = BackwardProducts<Config>;
    using Logits = typename Products::Logits;
    using KeyGradient = typename Products::KeyGradient;
    using ValueGradient = typename Products::ValueGradient;

    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    ConsumerThread thread;
    Products products{memory, thread.warpgroup};
    unsigned current = 0;  // index of the current step; between work items, of the next one

    __device__ __forceinline__ void run() {
        for (int item = 0;; ++item) {
            memory.kv_full().wait(item & 1);
            const int num_steps = uniform(memory.work_item(item).num_steps);
            if (num_steps < 0)
                break;
            KeyGradient dk;
            ValueGradient dv;
            clear(dk);
            clear(dv);
            if (num_steps > 0)
                process(dk, dv, num_steps, item);
            const BackwardEpilogue<Config> epilogue(args, memory.work_item(item), thread);
            thread.release_keys(memory.kv_empty());
            epilogue.store(dk, args.dk, args.dim, args.scale);
            epilogue.store(dv, args.dv, args.v_dim, 1.f);
        }
        stop_reducer(memory, thread);
    }

private:
    __device__ __forceinline__ void process(KeyGradient& dk, ValueGradient& dv, int num_steps, int item) {
        zero_masked_keys(memory, thread, memory.work_item(item));
        Logits p, ds;
        first_logits(p, ds);
#pragma unroll 1
        for (int left = num_steps - 1; left > 0; --left)
            step<false>(dk, dv, p, ds);
        step<true>(dk, dv, p, ds);
    }

    // Computes P and dS of the first step of a work item.
    __device__ __forceinline__ void first_logits(Logits& p, Logits& ds) const {
        memory.q_full(current).wait(memory.q_parity(current));
        products.issue_qk(p, current);
        wgmma_commit();
        memory.dout_full(current).wait(memory.dout_parity(current));
        const bool has_masked_rows = zero_masked_rows(memory, thread, current);
        products.issue_dov(ds, current);
        wgmma_commit();
        TransposedSoftmax<Config> softmax{memory, args, thread, current, has_masked_rows}; softmax.find_visible();
        wgmma_wait<1>();  // S
        fence_operand(p);
        softmax.compute_p(p);
        wgmma_wait<0>();  // dP
        fence_operand(ds);
        softmax.compute_ds(ds, p);
    }

    // Adds the current step to dK, dV and, through the reducer, to dQ. Begins with its P and dS and with no product in
    // flight. Unless the step is the last one of the work item, ends with P and dS of the next step.
    template <bool kLast> __device__ __forceinline__ void step(KeyGradient& dk, ValueGradient& dv, Logits& p, Logits& ds) {
        typename Products::Operand p_operand, ds_operand;
        round_to_operand<typename Config::Element>(p, p_operand);
        round_to_operand<typename Config::Element>(ds, ds_operand);
        store_transposed_ds<Config>(memory.ds(current), thread, ds_operand);
        products.issue_dv(dv, p_operand, current);
        wgmma_commit();
        fence_shared_for_async();
        named_barrier_sync(kLogitsStored, Config::kConsumerThreads);
        typename Products::QueryGradient dq;
        products.issue_transposed_dq(dq, current);
        wgmma_commit();
        wgmma_wait<1>();  // dV
        fence_operand(dv);
        thread.release(memory.dout_empty(current));
        products.issue_dk(dk, current);
        wgmma_commit();
        wgmma_wait<1>();  // dQ
        fence_operand(dq);
        store_dq(memory, thread, dq);  // waits for kDqEmpty and arrives at kDqFull
        const unsigned previous = current++;
        if constexpr (not kLast) {
            memory.q_full(current).wait(memory.q_parity(current));
            products.issue_qk(p, current);
            wgmma_commit();
        }
        wgmma_wait<kLast ? 0 : 1>();  // dK
        fence_operand(dk);
        thread.release(memory.q_empty(previous));
        if constexpr (not kLast) {
            memory.dout_full(current).wait(memory.dout_parity(current));
            const bool has_masked_rows = zero_masked_rows(memory, thread, current);  // waits for kZeroFilled if it has
            products.issue_dov(ds, current);
            wgmma_commit();
            TransposedSoftmax<Config> softmax{memory, args, thread, current, has_masked_rows}; softmax.find_visible();
            wgmma_wait<1>();  // S
            fence_operand(p);
            softmax.compute_p(p);
            wgmma_wait<0>();  // dP
            fence_operand(ds);
            softmax.compute_ds(ds, p);
        }
    }
};

}  // namespace jaxmagi::sm90
