#pragma once

#include "csrc/attention/sm90/backward/zero_hidden.cuh"
#include "csrc/attention/sm90/backward/dq_handover.cuh"
#include "csrc/attention/sm90/backward/epilogue.cuh"
#include "csrc/attention/sm90/backward/softmax.cuh"
#include "csrc/common/sm90/stmatrix.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// What consumer warpgroups for head dimensions of at most 128 have in common. Each has 64 keys of every tile. Logits
// are transposed, keys by queries, so that probabilities are operands from registers for the product that values need
// (FlashAttention-3). dQ sums over all keys of the tile: for it gradients of logits go through shared memory.

namespace jaxmagi::sm90 {

// Order has the order of the products between two steps, and begins those for dQ and dK:
//   advance(dk, dv, p, ds)        from the probabilities of a step and the gradients of its logits, with no product in
//                                 flight, to those of the next step
//   begin_dq(dq)                  the warpgroup's part, of the step in work
//   begin_dk(dk, ds_operand, of)  of a step, from registers or from shared memory
template <typename Config, typename Order> struct BackwardConsumer {
    using Element = typename Config::Element;
    using Logits = float[Config::kRows / 2];
    using Operand = uint32_t[Config::kRows / 16][4];
    using KeyGradient = float[Config::kDim / 2];
    using ValueGradient = float[Config::kVDim / 2];
    using QueryGradient = float[Config::kRowBlock / 2];  // the warpgroup's part of dQ: 64 columns of a row block
    static constexpr int kUnused = 16;  // panel strides

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
            KeyGradient dk;
            ValueGradient dv;
            clear(dk);
            clear(dv);
            if (num_steps > 0)
                attend(dk, dv, num_steps, turn);
            const BackwardEpilogue<Config> epilogue(args, memory.tile_message(turn), first_key(), thread_anew() % 32);
            release_keys();
            epilogue.store(dk, args.dk, args.dim, args.scale);
            epilogue.store(dv, args.dv, args.v_dim, 1.f);
        }
        sender().finish();
    }

protected:
    // In each step: what follows from it would stay in registers.
    __device__ __forceinline__ unsigned thread_anew() const { return opaque(static_cast<unsigned>(thread)); }
    __device__ __forceinline__ int first_key() const {
        const unsigned own = thread_anew();
        return warpgroup * 64 + static_cast<int>(own / 32 * 16 + own % 32 / 4);
    }
    __device__ __forceinline__ BackwardCleaner<Config> cleaner() const {
        return {memory, static_cast<int>(warpgroup * kWarpgroupThreads + thread_anew())};
    }
    __device__ __forceinline__ DqSender<Config> sender() const {
        return {memory, warpgroup, static_cast<int>(thread_anew())};
    }
    __device__ __forceinline__ ThreadRows rows() const {
        return {memory.rows(step), static_cast<int>(thread_anew() % 4 * 2)};
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

    __device__ __forceinline__ void attend(KeyGradient& dk, ValueGradient& dv, int num_steps, int turn) {
        if (not memory.tile_message(turn).all_seen)
            cleaner().clean_keys(memory.tile_message(turn));
        Logits p, ds;
        begin_logits(p);
        wgmma_commit();
        const bool has_blind_rows = await_dout();
        begin_dp(ds);
        wgmma_commit();
        to_gradients<0>(p, ds, has_blind_rows);
#pragma unroll 1
        for (int left = num_steps - 1; left > 0; --left)
            static_cast<Order&>(*this).advance(dk, dv, p, ds);
        finish(dk, dv, p, ds);
    }

    // The last step.
    __device__ __forceinline__ void finish(KeyGradient& dk, ValueGradient& dv, Logits& p, Logits& ds) {
        begin_sums(dk, dv, p, ds);
        finish_dk<0>(dk, step);
        ++step;
    }

    // dV is finished and dQ handed over, dK left running.
    __device__ __forceinline__ void begin_sums(KeyGradient& dk, ValueGradient& dv, const Logits& p,
                                               const Logits& ds) const {
        Operand ds_operand;
        QueryGradient dq;
        begin_dv_and_dq(dq, dv, ds_operand, p, ds);
        static_cast<const Order&>(*this).begin_dk(dk, ds_operand, step);
        wgmma_wait<1>();
        fence_operand(dq);
        sender().send(dq);
    }

    // dV is finished, dQ left running.
    __device__ __forceinline__ void begin_dv_and_dq(QueryGradient& dq, ValueGradient& dv, Operand& ds_operand,
                                                    const Logits& p, const Logits& ds) const {
        begin_dv_and_share(dv, ds_operand, p, ds);
        static_cast<const Order&>(*this).begin_dq(dq);
        wgmma_wait<1>();
        fence_operand(dv);
        release(memory.dout_empty(step));
    }

    // With so many products begun after it.
    template <int kPending> __device__ __forceinline__ void finish_dk(KeyGradient& dk, unsigned of) const {
        wgmma_wait<kPending>();
        fence_operand(dk);
        release(memory.q_empty(of));
    }

    // The product for dV is begun, and the gradients of the logits of all warpgroups are there for dQ.
    __device__ __forceinline__ void begin_dv_and_share(ValueGradient& dv, Operand& ds_operand, const Logits& p,
                                                       const Logits& ds) const {
        Operand p_operand;
        round_to_operand<Element>(p, p_operand);
        round_to_operand<Element>(ds, ds_operand);
        write_logit_gradients(ds_operand);
        fence_operand(dv);
        wgmma_fence();
        add_to_dv(dv, p_operand);
        wgmma_commit();
        fence_shared_for_async();
        named_barrier_sync(kLogitsWritten, Config::kConsumerThreads);
    }

    // Returns whether the step has rows without logits.
    __device__ __forceinline__ bool await_dout() const {
        memory.dout_full(step).wait(memory.dout_parity(step));
        const bool has_blind_rows = memory.rows(step)->begins_blind_block != 0;
        if (has_blind_rows)
            cleaner().clean_rows(step);
        return has_blind_rows;
    }

    // Logits become probabilities, and gradients of probabilities those of logits. Both are waited for, but not what
    // was begun after them.
    template <int kPending>
    __device__ __forceinline__ void to_gradients(Logits& p, Logits& ds, bool has_blind_rows) const {
        const StepMessage& message = memory.step_message(step);
        const bool masked = message.masked or has_blind_rows;
        if constexpr (Config::kSoftCap) {
            SeenBits seen{~0u, ~0u};
            if (masked)
                seen = seen_bits<Config::kRows / 2>(message, rows(), first_key(), has_blind_rows);
            wgmma_wait<kPending + 1>();
            fence_operand(p);
            saturate(p, args.logit_scale);
            wgmma_wait<kPending>();
            fence_operand(ds);
            differentiate_capped(ds, p, rows(), seen, args.cap_log2);
        } else {
            wgmma_wait<kPending + 1>();
            fence_operand(p);
            exponentiate(p, rows(), args.logit_scale);
            if (masked)
                hide(p, seen_bits<Config::kRows / 2>(message, rows(), first_key(), has_blind_rows));
            wgmma_wait<kPending>();
            fence_operand(ds);
            differentiate(ds, p, rows());
        }
    }

    // --- products ---

    __device__ __forceinline__ void begin_logits(Logits& logits) const {
        memory.q_full(step).wait(memory.q_parity(step));
        const SwizzledOperand k(memory.k() + warpgroup * 64 * kPanelRowBytes, kUnused), q(memory.q(step), kUnused);
        multiply<Config::kDim>(logits, k, q);
    }

    __device__ __forceinline__ void begin_dp(Logits& dp) const {
        const SwizzledOperand v(memory.v() + warpgroup * 64 * kPanelRowBytes, kUnused);
        const SwizzledOperand dout(memory.dout(step), kUnused);
        multiply<Config::kVDim>(dp, v, dout);
    }

    // Of 64 keys and all queries, over the head dimension.
    template <int kColumns>
    __device__ __forceinline__ static void multiply(Logits& logits, const SwizzledOperand& keys,
                                                    const SwizzledOperand& queries) {
        fence_operand(logits);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i) {
            const int panel = i / 4, inside = i % 4 * 32;
            Wgmma<Element, Config::kRows>::template mma<0, 0>(
                logits, keys.at(panel * Config::kKeys * kPanelRowBytes + inside),
                queries.at(panel * Config::kRows * kPanelRowBytes + inside), i != 0);
        }
    }

    __device__ __forceinline__ void add_to_dv(ValueGradient& dv, const Operand& p) const {
        const SwizzledOperand dout(memory.dout(step), Config::kRows * kPanelRowBytes);
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kVDim>::template mma<1>(dv, p[i], dout.at(i * 16 * kPanelRowBytes), true);
    }

    // --- shared memory ---

    // As queries by keys, a panel for the 64 keys of each warpgroup.
    __device__ __forceinline__ void write_logit_gradients(const Operand& ds) const {
        const unsigned own = thread_anew(), lane = own % 32, column = own / 32 * 32 + lane / 8 % 2 * 16;  // in bytes
        const SharedAddress panel = memory.logits(step) + warpgroup * Config::kRows * kPanelRowBytes;
        const unsigned first = lane / 16 * 8 + lane % 8;
        const SharedAddress row = panel + first * kPanelRowBytes + (column ^ first % 8 * 16);
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            store_transposed(row + i * 16 * kPanelRowBytes, ds[i]);
    }
};

}  // namespace jaxmagi::sm90
