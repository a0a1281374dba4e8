#pragma once

#include "csrc/attention/sm90/backward/epilogue_wide.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/store_dq.cuh"
#include "csrc/attention/sm90/backward/store_ds.cuh"
#include "csrc/attention/sm90/backward/zero_masked.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// The consumer warpgroup for head dimensions above 128, where dK and dV of 64 keys would not fit into its registers.
// Each warpgroup has S and dP of 32 keys, but dK and dV, transposed, of all keys of the tile and of some panels of the
// head dimension. P and dS go through shared memory.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardConsumerWide {
    using Element = typename Config::Element;
    static constexpr int kLogitsKeys = 32;  // keys of S and dP of a warpgroup
    static_assert(Config::kKeys == kLogitsKeys * Config::kConsumers and Config::kRows == 64);
    // Panels of the head dimension of a warpgroup. The last warpgroup may have no panel of values.
    static constexpr int kPanels = panels(Config::kDim) / Config::kConsumers,
                         kVPanels = (panels(Config::kVDim) + Config::kConsumers - 1) / Config::kConsumers;
    static_assert(kPanels * Config::kConsumers == panels(Config::kDim) and kPanels == Config::kDqPasses);
    using Logits = float[kLogitsKeys / 2];
    using Softmax = WideSoftmax<Config, kLogitsKeys / 2>;
    using KeyGradient = float[kPanels][Config::kKeys / 2];
    using ValueGradient = float[kVPanels][Config::kKeys / 2];
    using QueryGradient = float[kPanels][32];
    static constexpr int kUnused = 16;  // stride of panels
    // Registers allow the next S while the products for dV, dK and dQ run.
    static constexpr bool kEarlyLogits = Config::kConsumers == 2;

    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    ConsumerThread thread;
    unsigned current = 0;  // index of the current step; between work items, of the next one

    __device__ __forceinline__ void run() {
        for (int item = 0;; ++item) {
            memory.kv_full().wait(item & 1);
            const int num_steps = uniform(memory.work_item(item).num_steps);
            if (num_steps < 0)
                break;
            KeyGradient dk;
            ValueGradient dv;
            clear_panels(dk);
            clear_panels(dv);
            if (num_steps > 0)
                process(dk, dv, num_steps, item);
            thread.release_keys(memory.kv_empty());
            const BackwardEpilogueWide<Config> epilogue(args, memory.work_item(item), thread.index());
#pragma unroll
            for (int i = 0; i < kPanels; ++i)
                epilogue.store(dk[i], args.dk, args.dim, panel(i), args.scale);
#pragma unroll
            for (int i = 0; i < kVPanels; ++i)
                epilogue.store(dv[i], args.dv, args.v_dim, v_panel(i), 1.f);
        }
        stop_reducer(memory, thread);
    }

private:
    __device__ __forceinline__ int panel(int i) const { return thread.warpgroup * kPanels + i; }
    __device__ __forceinline__ int v_panel(int i) const { return thread.warpgroup * kVPanels + i; }

    template <int kCount, int kSize> __device__ __forceinline__ static void clear_panels(float (&x)[kCount][kSize]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            clear(x[i]);
    }
    template <int kCount, int kSize> __device__ __forceinline__ static void fence_panels(float (&x)[kCount][kSize]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            fence_operand(x[i]);
    }

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
        issue_qk(p, current);
        wgmma_commit();
        memory.dout_full(current).wait(memory.dout_parity(current));
        const bool has_masked_rows = zero_masked_rows(memory, thread, current);
        issue_dov(ds, current);
        wgmma_commit();
        const Softmax softmax(memory, args, thread, current, has_masked_rows);
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
        constexpr bool kEarly = kEarlyLogits and not kLast, kLate = not kEarlyLogits and not kLast;
        named_barrier_sync(kLogitsRead, Config::kConsumerThreads);
        store_logits(memory.p(), p);
        store_logits(memory.ds(current), ds);
        fence_shared_for_async();
        named_barrier_sync(kLogitsStored, Config::kConsumerThreads);
        QueryGradient dq;
        fence_panels(dv);
        fence_panels(dk);
        fence_panels(dq);
        wgmma_fence();
        issue_dv(dv, current);
        wgmma_commit();
        issue_dk(dk, current);
        wgmma_commit();
        issue_dq(dq, current);
        wgmma_commit();
        const unsigned previous = current++;
        if constexpr (kEarly) {
            memory.q_full(current).wait(memory.q_parity(current));
            issue_qk(p, current);
            wgmma_commit();
        }
        wgmma_wait<kEarly ? 3 : 2>();  // dV
        fence_panels(dv);
        thread.release(memory.dout_empty(previous));
        wgmma_wait<kEarly ? 2 : 1>();  // dK
        fence_panels(dk);
        thread.release(memory.q_empty(previous));
        wgmma_wait<kEarly ? 1 : 0>();  // dQ
        fence_panels(dq);
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
            store_dq(memory, thread, dq[i]);  // waits for kDqEmpty and arrives at kDqFull
        if constexpr (kLate) {
            memory.q_full(current).wait(memory.q_parity(current));
            issue_qk(p, current);
            wgmma_commit();
        }
        if constexpr (not kLast) {
            memory.dout_full(current).wait(memory.dout_parity(current));
            const bool has_masked_rows = zero_masked_rows(memory, thread, current);  // waits for kZeroFilled if it has
            issue_dov(ds, current);
            wgmma_commit();
            const Softmax softmax(memory, args, thread, current, has_masked_rows);
            wgmma_wait<1>();  // S
            fence_operand(p);
            softmax.compute_p(p);
            wgmma_wait<0>();  // dP
            fence_operand(ds);
            softmax.compute_ds(ds, p);
        }
    }

    __device__ __forceinline__ void store_logits(SharedAddress to, const Logits& logits) const {
        uint32_t words[kLogitsKeys / 16][4];
        round_to_operand<Element>(logits, words);
        store_wide<Config>(to, thread, words);
    }

    // S = Q · K
    __device__ __forceinline__ void issue_qk(Logits& s, unsigned step) const {
        issue_over_head_dim<Config::kDim>(s, memory.q(step), memory.k());
    }

    // dP = dO · V
    __device__ __forceinline__ void issue_dov(Logits& dp, unsigned step) const {
        issue_over_head_dim<Config::kVDim>(dp, memory.dout(step), memory.v());
    }

    template <int kColumns>
    __device__ __forceinline__ void issue_over_head_dim(Logits& logits, SharedAddress query_panels,
                                                        SharedAddress key_panels) const {
        const SwizzledOperand queries(query_panels, kUnused);
        const SwizzledOperand keys(key_panels + thread.warpgroup * kLogitsKeys * kPanelRowBytes, kUnused);
        fence_operand(logits);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i) {
            const int panel = i / 4, inside = i % 4 * 32;
            Wgmma<Element, kLogitsKeys>::template mma<0, 0>(
                logits, queries.at(panel * Config::kRows * kPanelRowBytes + inside),
                keys.at(panel * Config::kKeys * kPanelRowBytes + inside), i != 0);
        }
    }

    // The next three leave the fence to the caller, one for all.

    // dV += P · dO
    __device__ __forceinline__ void issue_dv(ValueGradient& dv, unsigned step) const {
        if (kVPanels * Config::kConsumers != panels(Config::kVDim) and v_panel(0) >= panels(Config::kVDim))
            return;
#pragma unroll
        for (int i = 0; i < kVPanels; ++i)
            issue_over_queries(dv[i], memory.dout(step), v_panel(i), memory.p());
    }

    // dK += dS · Q
    __device__ __forceinline__ void issue_dk(KeyGradient& dk, unsigned step) const {
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
            issue_over_queries(dk[i], memory.q(step), panel(i), memory.ds(step));
    }

    // Multiplies a panel of Q or dO, transposed, with dS or P.
    __device__ __forceinline__ static void issue_over_queries(float (&gradient)[Config::kKeys / 2],
                                                              SharedAddress query_panels, int panel,
                                                              SharedAddress logits) {
        const SwizzledOperand rows(query_panels + panel * Config::kRows * kPanelRowBytes, kUnused);
        const SwizzledOperand keys(logits, Config::kRows * kPanelRowBytes);
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kKeys>::template mma<1, 1>(gradient, rows.at(i * 16 * kPanelRowBytes),
                                                              keys.at(i * 16 * kPanelRowBytes), true);
    }

    // dQ = dS · K
    __device__ __forceinline__ void issue_dq(QueryGradient& dq, unsigned step) const {
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
            const SwizzledOperand ds(memory.ds(step), kUnused);
            const SwizzledOperand k(memory.k() + panel(i) * Config::kKeys * kPanelRowBytes, kUnused);
#pragma unroll
            for (int j = 0; j < Config::kKeys / 16; ++j)
                Wgmma<Element, 64>::template mma<0, 1>(dq[i],
                                                       ds.at(j / 4 * Config::kRows * kPanelRowBytes + j % 4 * 32),
                                                       k.at(j * 16 * kPanelRowBytes), j != 0);
        }
    }
};

}  // namespace jaxmagi::sm90
