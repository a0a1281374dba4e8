#pragma once

#include "csrc/attention/sm90/backward/consumer.cuh"
#include "csrc/attention/sm90/backward/epilogue.cuh"
#include "csrc/attention/sm90/backward/hand_over.cuh"
#include "csrc/attention/sm90/backward/products.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/store_logits.cuh"
#include "csrc/attention/sm90/backward/zero_masked.cuh"

// The consumer warpgroup of narrow kernels, with a head dimension of at most 128. The two warpgroups take turns: the
// products of one keep the tensor cores busy while the other one computes P and dS. A warpgroup alone with the tensor
// cores has to have Q of the next step and the reducer's buffer for dQ in time: dK comes first, since Q is loaded again
// behind it, and dQ before dV, since it is stored beside dV.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardConsumerNarrow {
    static_assert(Config::kConsumers == 2, "two warpgroups take turns");
    using Products = BackwardProducts<Config>;
    using KeyGradient = typename Products::KeyGradient;
    using ValueGradient = typename Products::ValueGradient;
    using Softmax = TransposedSoftmax<Config>;

    // P and dS of a step, rounded, and the accumulator of S. Transposed dQ takes the registers of S: ptxas finds no
    // others.
    struct StepRegisters {
        typename Config::RoundedLogits p, ds;
        typename Products::Logits s;
    };

    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    ConsumerThread thread;
    Products products{memory, thread.warpgroup};
    unsigned current = 0;  // index of the current step; between work items, of the next one

    // Adds up dK and dV over the steps of a work item.
    __device__ __forceinline__ void run_steps(KeyGradient& dk, ValueGradient& dv, int num_steps) {
        StepRegisters registers;
        begin_steps(registers);
        if (num_steps == 1)
            return step<true, true>(dk, dv, registers);
        step<true, false>(dk, dv, registers);
#pragma unroll 1
        for (int left = num_steps - 2; left > 0; --left)
            step<false, false>(dk, dv, registers);
        step<false, true>(dk, dv, registers);
    }

    // Adds the current step to dK and dV and, through the reducer, the step before to dQ, unless this is the first one
    // of the work item. It begins with P and dS of the step, rounded, and no product in flight, and ends with those of
    // the next step; the last one ends with its own dQ.
    template <bool kFirst, bool kLast>
    __device__ __forceinline__ void step(KeyGradient& dk, ValueGradient& dv, StepRegisters& registers) {
        typename Products::QueryGradient own_dq;
        auto& dq = query_gradient(registers, own_dq);
        if constexpr (not kFirst)
            await_ds(current - 1);
        take_turn();
        products.issue_dk(dk, registers.ds, current);
        wgmma_commit();
        if constexpr (not kFirst)
            issue_dq(dq, current - 1);
        products.issue_dv(dv, registers.p, current);
        wgmma_commit();
        store_ds(registers);  // waits for ds_empty and arrives at ds_full
        wgmma_wait<kFirst ? 1 : 2>();  // dK
        fence_operand(dk);
        thread.release(memory.q_empty(current));
        if constexpr (not kFirst) {
            wgmma_wait<1>();  // dQ
            hand_over_dq(dq, current - 1);
        }
        bool has_masked_rows = false;  // of the next step
        if constexpr (not kLast) {
            has_masked_rows = await_queries(current + 1);
            issue_logits(registers, current + 1);
        }
        wgmma_wait<kLast ? 0 : 1>();  // dV
        fence_operand(dv);
        thread.release(memory.dout_empty(current));
        if constexpr (kLast) {
            pass_turn();
            await_ds(current);
            issue_dq(dq, current);
            wgmma_wait<0>();  // dQ
            hand_over_dq(dq, current);
            ++current;
        } else {
            ++current;
            finish_logits(registers, has_masked_rows);
        }
    }

    // Computes P and dS of the first step of a work item.
    __device__ __forceinline__ void begin_steps(StepRegisters& registers) const {
        const bool has_masked_rows = await_queries(current);
        take_turn();
        issue_logits(registers, current);
        finish_logits(registers, has_masked_rows);
    }

    // Gives warpgroup 0 its first turn. Called once, before all work items.
    __device__ __forceinline__ void give_first_turn() const {
        if (thread.warpgroup == 1)
            pass_turn();
    }

    __device__ __forceinline__ void store(const KeyGradient& dk, const ValueGradient& dv, int item) const {
        const BackwardEpilogue<Config> epilogue(args, memory.work_item(item), thread);
        thread.arrive_by_warps(memory.kv_empty());
        if (not memory.schedule().adds_gradients()) {
            epilogue.store(dk, epilogue.gradients.dk, args.dim, args.scale);
            epilogue.store(dv, epilogue.gradients.dv, args.v_dim, 1.f);
        } else {
            epilogue.hand_over(memory, thread, dk, args.scale);
            epilogue.hand_over(memory, thread, dv, 1.f);
        }
    }

private:
    // Waits until the other warpgroup has issued the products of its step.
    __device__ __forceinline__ void take_turn() const {
        named_barrier_sync(kTensorTurn + thread.warpgroup, Config::kConsumerThreads);
    }
    __device__ __forceinline__ void pass_turn() const {
        named_barrier_arrive(kTensorTurn + 1 - thread.warpgroup, Config::kConsumerThreads);
    }

    // Waits for Q of a step. Returns true if the block has fully masked rows.
    __device__ __forceinline__ bool await_queries(unsigned step) const {
        memory.q_full(step).wait(memory.q_parity(step));
        return memory.rows(step)->block_has_masked_rows != 0;
    }

    // Waits until both warpgroups have stored dS of a step.
    __device__ __forceinline__ void await_ds(unsigned step) const {
        memory.ds_full(step).wait(memory.ds_parity(step));
        fence_shared_for_async();
    }

    __device__ __forceinline__ void issue_logits(StepRegisters& registers, unsigned step) const {
        products.issue_qk(registers.s, step);
        wgmma_commit();
    }

    // Issues the product for dP of the current step behind that for S, once fully masked rows are zero-filled, passes
    // the turn on, and computes P and dS.
    __device__ __forceinline__ void finish_logits(StepRegisters& registers, bool has_masked_rows) const {
        typename Products::Logits dp;
        memory.dout_full(current).wait(memory.dout_parity(current));
        zero_masked_rows(memory, thread, current, has_masked_rows);
        products.issue_dov(dp, current);
        wgmma_commit();
        pass_turn();
        Softmax softmax{memory, args, thread, current, has_masked_rows};
        softmax.load_lse();
        wgmma_wait<1>();  // S
        fence_operand(registers.s);
        softmax.begin_p(registers.s);
        softmax.load_delta();
        wgmma_wait<0>();  // dP
        fence_operand(dp);
        softmax.finish(registers.s, dp, registers.p, registers.ds);
    }

    // Stores dS of the current step for the products for dQ of both warpgroups. The product for dK, which has the same
    // registers as operand, may be in flight: both only read them.
    __device__ __forceinline__ void store_ds(const StepRegisters& registers) const {
        memory.ds_empty(current).wait(memory.ds_parity(current) ^ 1);
        store_transposed_ds<Config>(memory.ds(current), thread, registers.ds);
        thread.arrive_by_warps(memory.ds_full(current));
    }

    __device__ __forceinline__ void issue_dq(auto& dq, unsigned step) const {
        if constexpr (Config::kTransposedDq)
            products.issue_transposed_dq(dq, step);
        else
            products.issue_dq(dq, step);
        wgmma_commit();
    }

    // Hands dQ of a step over, whose product is complete.
    __device__ __forceinline__ void hand_over_dq(auto& dq, unsigned step) const {
        fence_operand(dq);
        thread.release(memory.ds_empty(step));
        sm90::hand_over_dq(memory, thread, dq);  // waits for kPartEmpty and arrives at kPartFull
    }

    __device__ __forceinline__ static auto& query_gradient(StepRegisters& registers,
                                                           typename Products::QueryGradient& own) {
        if constexpr (Config::kTransposedDq)
            return registers.s;
        else
            return own;
    }
};

}  // namespace jaxmagi::sm90
