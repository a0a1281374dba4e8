#pragma once

#include "csrc/attention/sm90/backward/consumer.cuh"
#include "csrc/attention/sm90/backward/epilogue.cuh"
#include "csrc/attention/sm90/backward/products.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/store_logits.cuh"

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
            const Softmax softmax{memory, args, thread, current, has_masked_rows};
            wgmma_wait<1>();  // S
            fence_operand(p);
            softmax.compute_p(p);
            wgmma_wait<0>();  // dP
            fence_operand(ds);
            softmax.compute_ds(ds, p);
        }
    }

    __device__ __forceinline__ void store(const KeyGradient& dk, const ValueGradient& dv, int item) const {
        const BackwardEpilogue<Config> epilogue(args, memory.work_item(item), thread);
        thread.release_keys(memory.kv_empty());
        epilogue.store(dk, args.dk, args.dim, args.scale);
        epilogue.store(dv, args.dv, args.v_dim, 1.f);
    }
};

}  // namespace jaxmagi::sm90
