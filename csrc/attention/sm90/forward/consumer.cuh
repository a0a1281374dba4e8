#pragma once

#include "csrc/attention/sm90/forward/epilogue.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// A consumer warpgroup: 64 query rows of every tile.
//
// Step j issues S = Q · K_j and O += P · V_(j-1) together, and works on the softmax of S while the second product
// still runs (FlashAttention-3, section 3.2). Where Config::kTurns says so, warpgroups take turns at issuing, so that
// the softmax of one runs beside the products of the others. The output stays in registers over all bands of the
// tile. A warpgroup begins with the first block that its own rows see or that holds keys of two runs, or with the last
// one of the tile.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardConsumer {
    using Element = typename Config::Element;
    using Logits = float[Config::kKeys / 2];
    using Operand = uint32_t[Config::kKeys / 16][4];
    using Output = float[Config::kVDim / 2];
    static constexpr int kFirstBarrier = 1, kTurnThreads = 2 * kWarpgroupThreads;

    ForwardMemory<Config> memory;
    const ForwardArguments& args;
    int warpgroup, thread;  // among the consumers; in the warpgroup
    unsigned block = 0;     // the one in work; between tiles, the next one

    __device__ __forceinline__ void run() {
        if (Config::kTurns and warpgroup == 0)
            named_barrier_arrive(kFirstBarrier, kTurnThreads);
        for (int turn = 0;; ++turn) {
            memory.q_full().wait(turn & 1);
            const int num_blocks = uniform(memory.tile_message(turn).num_blocks);
            if (num_blocks > 0)
                attend(num_blocks, turn);
            else
                skip(num_blocks == 0, turn);
            if (num_blocks < 0)
                return;
        }
    }

private:
    // The first of a thread.
    __device__ __forceinline__ int row(int of) const { return warpgroup * 64 + of / 32 * 16 + of % 32 / 4; }
    __device__ __forceinline__ int first_column() const { return thread % 4 * 2; }
    __device__ __forceinline__ float to_log2() const { return Config::kSoftCap ? 1.f : args.logit_scale; }

    // Of keys or values: one thread may speak for its warpgroup, since a product is finished by its four warps
    // together.
    __device__ __forceinline__ void release(Mbarrier empty) const {
        if (thread == 0)
            empty.arrive();
    }

    // Every warp for itself: without products between, as in tiles that see nothing, they may drift apart.
    __device__ __forceinline__ void release_queries() const {
        __syncwarp();
        if (elect_lane())
            memory.q_empty().arrive();
    }

    // A tile whose rows see nothing, or no tile.
    __device__ __forceinline__ void skip(bool is_tile, int turn) const {
        if (is_tile)
            make_epilogue(turn).store_empty();
        if (stages_out()) {
            memory.out_empty(warpgroup).wait(memory.out_empty_parity(turn, warpgroup));
            send_out();
        }
        release_queries();
    }

    __device__ __forceinline__ void attend(int num_blocks, int turn) {
        for (; num_blocks > 1 and not sees_block(); --num_blocks)
            pass_block();
        RowState rows;
        Output out;
        Operand p;
        first_step(p, rows);
        clear(out);
#pragma unroll 1
        for (int left = num_blocks - 1; left > 0; --left) {
            ++block;
            step(out, p, rows);
        }
        last_step(out, p, rows, turn);
    }

    // Whether a position of this warpgroup sees a key of the block, or may see one of a second run.
    __device__ __forceinline__ bool sees_block() const {
        memory.k_full(block).wait(memory.parity(block));
        const BlockMessage& message = memory.block_message(block);
        const int first_row = warpgroup * 64, last_row = first_row + 63;
        const int first = max(first_row >> args.schedule.pack_shift, message.row_begin);
        const int last = min(last_row >> args.schedule.pack_shift, message.row_end - 1);
        return uniform(message.has_guest or (first <= last and first + message.lower < message.end_column and
                                             last + message.upper > message.first_column));
    }

    // Leaves a block to the other warpgroups. No product holds the warps together here: hence the barrier, before one
    // thread gives back what the others may still wait for.
    __device__ __forceinline__ void pass_block() {
        memory.v_full(block).wait(memory.parity(block));
        if constexpr (Config::kTurns) {
            named_barrier_sync(kFirstBarrier + warpgroup, kTurnThreads);
            named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % Config::kConsumers, kTurnThreads);
        } else {
            named_barrier_sync(kFirstBarrier + warpgroup, kWarpgroupThreads);
        }
        release(memory.k_empty(block));
        release(memory.v_empty(block));
        ++block;
    }

    __device__ __forceinline__ ForwardEpilogue<Config> make_epilogue(int turn) const {
        const int own = opaque(thread);
        return {args, memory.tile_message(turn), row(own), own % 32};
    }

    __device__ __forceinline__ static void clear(Output& out) {
#pragma unroll
        for (int i = 0; i < Config::kVDim / 2; ++i)
            out[i] = 0.f;
    }

    __device__ __forceinline__ void first_step(Operand& p, RowState& rows) const {
        Logits logits;
        memory.k_full(block).wait(memory.parity(block));
        fence_operand(logits);
        wgmma_fence();
        multiply_keys(logits);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(logits);
        release(memory.k_empty(block));
        softmax<true>(logits, rows);
        round_to_operand<Element>(logits, p);
    }

    __device__ __forceinline__ void step(Output& out, Operand& p, RowState& rows) const {
        const unsigned previous = block - 1;
        Logits logits;
        if constexpr (Config::kTurns)
            named_barrier_sync(kFirstBarrier + warpgroup, kTurnThreads);
        memory.k_full(block).wait(memory.parity(block));
        fence_operand(logits);
        fence_operand(out);
        wgmma_fence();
        multiply_keys(logits);
        wgmma_commit();
        memory.v_full(previous).wait(memory.parity(previous));
        wgmma_fence();
        multiply_values(out, p, previous);
        wgmma_commit();
        if constexpr (Config::kTurns)
            named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % Config::kConsumers, kTurnThreads);
        const bool masked = memory.block_message(block).masked;
        wgmma_wait<1>();
        fence_operand(logits);
        release(memory.k_empty(block));
        const bool rescale = masked ? softmax<true>(logits, rows) : softmax<false>(logits, rows);
        finish_before_wait(rows);
        wgmma_wait<0>();
        fence_operand(out);
        release(memory.v_empty(previous));
        round_to_operand<Element>(logits, p);
        if (rescale)
            scale_rows(out, rows.scale);
    }

    // The exponentials have to run beside the product that is waited for next. ptxas would move them behind the wait;
    // it does not move an arrival whose condition (never true) depends on them.
    __device__ __forceinline__ void finish_before_wait(const RowState& rows) const {
        if (rows.sum[0] + rows.sum[1] < 0.f)
            memory.q_empty().arrive();
    }

    __device__ __forceinline__ void last_step(Output& out, Operand& p, const RowState& rows, int turn) {
        const ForwardEpilogue<Config> epilogue = make_epilogue(turn);
        release_queries();
        memory.v_full(block).wait(memory.parity(block));
        fence_operand(out);
        wgmma_fence();
        multiply_values(out, p, block);
        wgmma_commit();
        const auto factors = epilogue.finish_rows(rows);
        wgmma_wait<0>();
        fence_operand(out);
        release(memory.v_empty(block));
        ++block;
        epilogue.normalise(out, factors);
        if (args.out_f32)
            epilogue.store_f32(out);
        else
            store_16bit(out, epilogue, turn);
    }

    __device__ __forceinline__ bool stages_out() const { return Config::kStagesOut and not args.out_f32; }

    __device__ __forceinline__ void store_16bit(const Output& out, const ForwardEpilogue<Config>& epilogue,
                                                int turn) const {
        if constexpr (Config::kStagesOut) {
            memory.out_empty(warpgroup).wait(memory.out_empty_parity(turn, warpgroup));
            epilogue.stage(out, memory.out() + thread / 32 * 16 * kPanelRowBytes);
            fence_shared_for_async();
            send_out();
        } else {
            epilogue.store_16bit(out);
        }
    }

    __device__ __forceinline__ void send_out() const {
        __syncwarp();
        if (elect_lane())
            memory.out_full().arrive();
    }

    __device__ __forceinline__ void multiply_keys(Logits& logits) const {
        constexpr int kUnused = 16;
        const SwizzledOperand q(memory.q() + warpgroup * 64 * kPanelRowBytes, kUnused), k(memory.k(block), kUnused);
#pragma unroll
        for (int i = 0; i < Config::kDim / 16; ++i) {
            const int panel = i / 4, inside = i % 4 * 32;
            Wgmma<Element, Config::kKeys>::template mma<0, 0>(
                logits, q.at(panel * Config::kRows * kPanelRowBytes + inside),
                k.at(panel * Config::kKeys * kPanelRowBytes + inside), i != 0);
        }
    }

    __device__ __forceinline__ void multiply_values(Output& out, Operand& p, unsigned of) const {
        const SwizzledOperand v(memory.v(of), Config::kKeys * kPanelRowBytes);
#pragma unroll
        for (int i = 0; i < Config::kKeys / 16; ++i)
            Wgmma<Element, Config::kVDim>::template mma<1>(out, p[i], v.at(i * 16 * kPanelRowBytes), true);
    }

    // What the rows see of the block.
    __device__ __forceinline__ VisibleBits<Config::kKeys / 2> seen_bits() const {
        const int pack_shift = args.schedule.pack_shift;
        const auto find = [&](const BlockMessage& message) {
            return visible_bits<Config::kKeys / 2>(message, row(thread), pack_shift, first_column());
        };
        auto bits = find(memory.block_message(block));
        if (memory.block_message(block).has_guest)
            bits.add(find(memory.guest_message(block)));
        return bits;
    }

    // Returns whether the output so far has to be multiplied with rows.scale.
    template <bool kMasked>
    __device__ __forceinline__ bool softmax(Logits& logits, RowState& rows) const {
        if constexpr (Config::kSoftCap)
            cap_logits(logits, args.logit_scale, args.cap_log2);
        if constexpr (kMasked)
            hide(logits, seen_bits());
        const bool moved = move_references(logits, rows, to_log2());
        exponentiate(logits, rows, to_log2());
        return moved;
    }
};

}  // namespace jaxmagi::sm90
