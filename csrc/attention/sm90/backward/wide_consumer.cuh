#pragma once

#include "csrc/attention/sm90/backward/zero_hidden.cuh"
#include "csrc/attention/sm90/backward/dq_handover.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/attention/sm90/backward/wide_epilogue.cuh"
#include "csrc/common/sm90/stmatrix.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// A consumer warpgroup for head dimensions above 128. Each has the logits of 32 keys, but dK and dV, transposed, of
// all keys of the tile: 64 rows (of the head dimension) in a product. Probabilities and gradients of logits go
// through shared memory.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardWideConsumer {
    using Element = typename Config::Element;
    static constexpr int kOwnKeys = 32;  // whose logits a warpgroup has
    static_assert(Config::kKeys == kOwnKeys * Config::kConsumers and Config::kRows == 64);
    // Panels of the head dimension that a warpgroup has, the last one perhaps none of values.
    static constexpr int kPanels = panels(Config::kDim) / Config::kConsumers,
                         kVPanels = (panels(Config::kVDim) + Config::kConsumers - 1) / Config::kConsumers;
    static_assert(kPanels * Config::kConsumers == panels(Config::kDim) and kPanels == Config::kDqPasses);
    using Logits = float[kOwnKeys / 2];
    using Gradient = float[Config::kKeys / 2];  // of keys or values, in one panel
    using QueryGradient = float[32];
    static constexpr int kUnused = 16;  // panel strides
    // Whether registers allow the logits of a step beside the sums of the last one.
    static constexpr bool kEarlyLogits = Config::kConsumers == 2;

    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int warpgroup, thread;  // among the consumers; in the warpgroup
    unsigned step = 0;      // the one in work; between tiles, the next one

    __device__ __forceinline__ void run() {
        for (int turn = 0;; ++turn) {
            memory.kv_full().wait(turn & 1);
            const int num_steps = uniform(memory.tile_message(turn).num_steps);
            if (num_steps < 0)
                break;
            Gradient dk[kPanels], dv[kVPanels];
            clear_all(dk);
            clear_all(dv);
            if (num_steps > 0)
                attend(dk, dv, num_steps, turn);
            release_keys();
            const BackwardWideEpilogue<Config> epilogue(args, memory.tile_message(turn), thread_anew());
#pragma unroll
            for (int i = 0; i < kPanels; ++i)
                epilogue.store(dk[i], args.dk, args.dim, panel(i), args.scale);
#pragma unroll
            for (int i = 0; i < kVPanels; ++i)
                epilogue.store(dv[i], args.dv, args.v_dim, v_panel(i), 1.f);
        }
        sender().finish();
    }

private:
    __device__ __forceinline__ int panel(int i) const { return warpgroup * kPanels + i; }
    __device__ __forceinline__ int v_panel(int i) const { return warpgroup * kVPanels + i; }
    // In each step: what follows from it would stay in registers.
    __device__ __forceinline__ unsigned thread_anew() const { return opaque(static_cast<unsigned>(thread)); }
    __device__ __forceinline__ int row() const {
        const unsigned own = thread_anew();
        return static_cast<int>(own / 32 * 16 + own % 32 / 4);
    }
    __device__ __forceinline__ int first_column() const {
        return warpgroup * kOwnKeys + static_cast<int>(thread_anew() % 4 * 2);
    }
    __device__ __forceinline__ BackwardCleaner<Config> cleaner() const {
        return {memory, static_cast<int>(warpgroup * kWarpgroupThreads + thread_anew())};
    }
    __device__ __forceinline__ DqSender<Config> sender() const {
        return {memory, warpgroup, static_cast<int>(thread_anew())};
    }

    // One thread may speak for its warpgroup, since a product is finished by its four warps together.
    __device__ __forceinline__ void release(Mbarrier empty) const {
        if (thread == 0)
            empty.arrive();
    }

    // Every warp for itself: tiles that nobody sees have no products.
    __device__ __forceinline__ void release_keys() const {
        __syncwarp();
        if (thread % 32 == 0)
            memory.kv_empty().arrive();
    }

    template <int kCount, int kSize> __device__ __forceinline__ static void clear_all(float (&x)[kCount][kSize]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            clear(x[i]);
    }
    template <int kCount, int kSize> __device__ __forceinline__ static void fence_operands(float (&x)[kCount][kSize]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            fence_operand(x[i]);
    }

    // A turn of the loop begins with the probabilities of a step and the gradients of its logits, and no product in
    // flight, and ends with those of the next step.
    __device__ __forceinline__ void attend(Gradient (&dk)[kPanels], Gradient (&dv)[kVPanels], int num_steps, int turn) {
        if (not memory.tile_message(turn).all_seen)
            cleaner().clean_keys(memory.tile_message(turn));
        Logits p, ds;
        begin_logits(p);
        begin_dp_and_differentiate(p, ds);
#pragma unroll 1
        for (int left = num_steps - 1; left > 0; --left) {
            share(p, ds);
            QueryGradient dq[kPanels];
            begin_sums(dq, dk, dv);
            ++step;
            if constexpr (kEarlyLogits)
                begin_logits(p);
            finish_sums<kEarlyLogits>(dq, dk, dv, step - 1);
            if constexpr (not kEarlyLogits)
                begin_logits(p);
            begin_dp_and_differentiate(p, ds);
        }
        share(p, ds);
        QueryGradient dq[kPanels];
        begin_sums(dq, dk, dv);
        finish_sums<0>(dq, dk, dv, step);
        ++step;
    }

    // Of 64 queries and the warpgroup's keys.
    __device__ __forceinline__ void begin_logits(Logits& logits) const {
        memory.q_full(step).wait(memory.q_parity(step));
        multiply<Config::kDim>(logits, memory.q(step), memory.k());
    }

    __device__ __forceinline__ void begin_dp_and_differentiate(Logits& p, Logits& ds) const {
        memory.dout_full(step).wait(memory.dout_parity(step));
        const bool has_blind_rows = memory.rows(step)->begins_blind_block != 0;
        if (has_blind_rows)
            cleaner().clean_rows(step);
        multiply<Config::kVDim>(ds, memory.dout(step), memory.v());
        const EightRows* const rows = memory.rows(step) + row() / 8;
        const float lse[2] = {rows[0].lse_log2[row() % 8], rows[1].lse_log2[row() % 8]};
        const float delta[2] = {rows[0].delta[row() % 8], rows[1].delta[row() % 8]};
        const StepMessage& message = memory.step_message(step);
        SeenBits seen{{~0u, ~0u}};
        if (message.masked or has_blind_rows)
            seen = row_bits(message, lse, row(), first_column());
        wgmma_wait<1>();
        fence_operand(p);
        if constexpr (Config::kSoftCap)
            saturate(p, args.logit_scale);
        else
            exponentiate_rows(p, lse, seen, args.logit_scale);
        wgmma_wait<0>();
        fence_operand(ds);
        if constexpr (Config::kSoftCap)
            differentiate_capped_rows(ds, p, lse, delta, seen, args.cap_log2);
        else
            differentiate_rows(ds, p, delta);
    }

    template <int kColumns>
    __device__ __forceinline__ void multiply(Logits& logits, SharedAddress of_queries, SharedAddress of_keys) const {
        const SwizzledOperand queries(of_queries, kUnused);
        const SwizzledOperand keys(of_keys + warpgroup * kOwnKeys * kPanelRowBytes, kUnused);
        fence_operand(logits);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i) {
            const int panel = i / 4, inside = i % 4 * 32;
            Wgmma<Element, kOwnKeys>::template mma<0, 0>(
                logits, queries.at(panel * Config::kRows * kPanelRowBytes + inside),
                keys.at(panel * Config::kKeys * kPanelRowBytes + inside), i != 0);
        }
        wgmma_commit();
    }

    // Shows the other warpgroups the probabilities and the gradients of the logits, once they have no use for the
    // last ones.
    __device__ __forceinline__ void share(const Logits& p, const Logits& ds) const {
        named_barrier_sync(kLogitsRead, Config::kConsumerThreads);
        write(memory.logits(0), p);
        write(memory.logits(1), ds);
        fence_shared_for_async();
        named_barrier_sync(kLogitsWritten, Config::kConsumerThreads);
    }

    // As queries by keys.
    __device__ __forceinline__ void write(SharedAddress to, const Logits& logits) const {
        uint32_t words[kOwnKeys / 16][4];
        round_to_operand<Element>(logits, words);
        const unsigned own = thread_anew(), lane = own % 32, row = own / 32 * 16 + lane % 16;
        const unsigned column = warpgroup % 2 * 64 + lane / 16 * 16;
        to += (warpgroup / 2 * Config::kRows + row) * kPanelRowBytes;
#pragma unroll
        for (int i = 0; i < kOwnKeys / 16; ++i)
            store_matrices(to + ((column + 32 * i) ^ row % 8 * 16), words[i]);
    }

    // dV, then dK, then dQ.
    __device__ __forceinline__ void begin_sums(QueryGradient (&dq)[kPanels], Gradient (&dk)[kPanels],
                                               Gradient (&dv)[kVPanels]) const {
        fence_operands(dv);
        fence_operands(dk);
        fence_operands(dq);
        wgmma_fence();
        if (kVPanels * Config::kConsumers == panels(Config::kVDim) or v_panel(0) < panels(Config::kVDim)) {
#pragma unroll
            for (int i = 0; i < kVPanels; ++i)
                add_to(dv[i], memory.dout(step), v_panel(i), memory.logits(0));
        }
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
            add_to(dk[i], memory.q(step), panel(i), memory.logits(1));
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
            begin_dq(dq[i], panel(i));
        wgmma_commit();
    }

    // A panel of queries or cotangents, transposed, times probabilities or gradients of logits.
    __device__ __forceinline__ static void add_to(Gradient& gradient, SharedAddress of_queries, int panel,
                                                  SharedAddress logits) {
        const SwizzledOperand rows(of_queries + panel * Config::kRows * kPanelRowBytes, kUnused);
        const SwizzledOperand keys(logits, Config::kRows * kPanelRowBytes);
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kKeys>::template mma<1, 1>(gradient, rows.at(i * 16 * kPanelRowBytes),
                                                              keys.at(i * 16 * kPanelRowBytes), true);
    }

    __device__ __forceinline__ void begin_dq(QueryGradient& dq, int panel) const {
        const SwizzledOperand ds(memory.logits(1), kUnused);
        const SwizzledOperand k(memory.k() + panel * Config::kKeys * kPanelRowBytes, kUnused);
#pragma unroll
        for (int i = 0; i < Config::kKeys / 16; ++i)
            Wgmma<Element, 64>::template mma<0, 1>(dq, ds.at(i / 4 * Config::kRows * kPanelRowBytes + i % 4 * 32),
                                                   k.at(i * 16 * kPanelRowBytes), i != 0);
    }

    // With so many products begun after them.
    template <int kPending>
    __device__ __forceinline__ void finish_sums(QueryGradient (&dq)[kPanels], Gradient (&dk)[kPanels],
                                                Gradient (&dv)[kVPanels], unsigned of) const {
        wgmma_wait<kPending + 2>();
        fence_operands(dv);
        release(memory.dout_empty(of));
        wgmma_wait<kPending + 1>();
        fence_operands(dk);
        release(memory.q_empty(of));
        wgmma_wait<kPending>();
        fence_operands(dq);
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
            sender().send(dq[i]);
    }
};

}  // namespace jaxmagi::sm90
