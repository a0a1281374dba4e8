#pragma once

#include "csrc/attention/sm90/forward/epilogue.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// A consumer warpgroup has 64 query rows of every tile.
//
// Step j issues S = Q · K_j and O += P · V_(j-1) together, and computes the softmax of S while the second product still
// runs (FlashAttention-3, section 3.2). With Config::kSchedulerBarrier the warpgroups issue in turn, so that the
// softmax of one overlaps with the products of the others. The output stays in registers over all bands of the tile. A
// warpgroup begins with the first block that its rows see or that has a packed tail, or with the last one of the tile.

namespace jaxmagi::sm90 {

template <typename Config> struct ForwardConsumer {
    using Element = typename Config::Element;
    using Logits = float[Config::kKeys / 2];
    using Operand = uint32_t[Config::kKeys / 16][4];
    using Output = float[Config::kVDim / 2];
    static constexpr int kFirstBarrier = 1, kPairThreads = 2 * kWarpgroupThreads;  // a named barrier for each warpgroup

    ForwardMemory<Config> memory;
    const ForwardArguments& args;
    int warpgroup, thread;  // among the consumers; in the warpgroup
    unsigned block = 0;     // the current block; between work items, the next one

    __device__ __forceinline__ void run() {
        if (Config::kSchedulerBarrier and warpgroup == 0)
            named_barrier_arrive(kFirstBarrier, kPairThreads);  // warpgroup 0 is the first to issue
        for (int item = 0;; ++item) {
            memory.q_full().wait(item & 1);
            const int num_blocks = uniform(memory.work_item(item).num_blocks);
            if (num_blocks > 0)
                process(num_blocks, item);
            else
                skip(num_blocks == 0, item);
            if (num_blocks < 0)
                return;
        }
    }

private:
    __device__ __forceinline__ int row_of(int thread) const {
        return warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    }
    __device__ __forceinline__ int first_column() const { return thread % 4 * 2; }
    __device__ __forceinline__ float to_log2() const { return Config::kSoftCap ? 1.f : args.logit_scale; }

    // Waits until it is this warpgroup's turn to issue products (FlashAttention-3's warp_scheduler_barrier_sync).
    __device__ __forceinline__ void scheduler_barrier_sync() const {
        if constexpr (Config::kSchedulerBarrier)
            named_barrier_sync(kFirstBarrier + warpgroup, kPairThreads);
    }
    // Lets the next warpgroup issue.
    __device__ __forceinline__ void scheduler_barrier_arrive() const {
        if constexpr (Config::kSchedulerBarrier)
            named_barrier_arrive(kFirstBarrier + (warpgroup + 1) % Config::kConsumers, kPairThreads);
    }

    // Releases keys or values. One thread speaks for its warpgroup, since the four warps finish a product together.
    __device__ __forceinline__ void release(Mbarrier empty) const {
        if (thread == 0)
            empty.arrive();
    }

    // Arrives for one warp, where no product keeps the warps together.
    __device__ __forceinline__ void arrive_from_warp(Mbarrier barrier) const {
        __syncwarp();
        if (elect_lane())
            barrier.arrive();
    }

    // Handles a fully masked tile, or the end of the work items.
    __device__ __forceinline__ void skip(bool is_tile, int item) const {
        if (is_tile)
            make_epilogue(item).store_empty();
        if (stages_out()) {
            memory.out_empty(warpgroup).wait(memory.out_empty_parity(item, warpgroup));
            arrive_from_warp(memory.out_full());
        }
        arrive_from_warp(memory.q_empty());
    }

    __device__ __forceinline__ void process(int num_blocks, int item) {
        for (; num_blocks > 1 and not is_visible(); --num_blocks)
            skip_block();
        RowState rows;
        Output out;
        Operand p;
        first_step(p, rows);
#pragma unroll
        for (float& x : out)
            x = 0.f;
#pragma unroll 1
        for (int left = num_blocks - 1; left > 0; --left) {
            ++block;
            step(out, p, rows);
        }
        last_step(out, p, rows, item);
    }

    // Returns true if a position of this warpgroup sees a key of the block, or may see one of its packed tail.
    __device__ __forceinline__ bool is_visible() const {
        memory.k_full(block).wait(memory.parity(block));
        const BlockDescriptor& keys = memory.descriptor(block);
        const int first_row = warpgroup * 64, last_row = first_row + 63;
        const int first = max(first_row >> args.first.schedule.pack_shift, keys.row_begin);
        const int last = min(last_row >> args.first.schedule.pack_shift, keys.row_end - 1);
        return uniform(keys.has_packed_tail or (first <= last and first + keys.lower < keys.end_column and
                                                last + keys.upper > keys.first_column));
    }

    // Leaves a block to the other warpgroups. No product keeps the warps together here: all of them have to pass a
    // barrier before one thread releases what they wait for.
    __device__ __forceinline__ void skip_block() {
        memory.v_full(block).wait(memory.parity(block));
        scheduler_barrier_sync();
        scheduler_barrier_arrive();
        if constexpr (not Config::kSchedulerBarrier)
            named_barrier_sync(kFirstBarrier + warpgroup, kWarpgroupThreads);
        release(memory.k_empty(block));
        release(memory.v_empty(block));
        ++block;
    }

    __device__ __forceinline__ ForwardEpilogue<Config> make_epilogue(int item) const {
        const int same_thread = opaque(thread);
        return {args, memory.work_item(item), row_of(same_thread), same_thread % 32};
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
        scheduler_barrier_sync();
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
        scheduler_barrier_arrive();
        const bool masked = memory.descriptor(block).masked;
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
            scale_rows(out, rows.correction);
    }

    // Keeps the exponentials before the next wait, so that they overlap with the product it waits for. ptxas would move
    // them after it, but it does not move an arrival whose condition (never true) depends on them.
    __device__ __forceinline__ void finish_before_wait(const RowState& rows) const {
        if (rows.row_sum[0] + rows.row_sum[1] < 0.f)
            memory.q_empty().arrive();
    }

    __device__ __forceinline__ void last_step(Output& out, Operand& p, const RowState& rows, int item) {
        const ForwardEpilogue<Config> epilogue = make_epilogue(item);
        arrive_from_warp(memory.q_empty());
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
            store_16bit(out, epilogue, item);
    }

    __device__ __forceinline__ bool stages_out() const { return Config::kStagesOut and not args.out_f32; }

    __device__ __forceinline__ void store_16bit(const Output& out, const ForwardEpilogue<Config>& epilogue,
                                                int item) const {
        if constexpr (Config::kStagesOut) {
            memory.out_empty(warpgroup).wait(memory.out_empty_parity(item, warpgroup));
            epilogue.stage(out, memory.out() + thread / 32 * 16 * kPanelRowBytes);
            fence_shared_for_async();
            arrive_from_warp(memory.out_full());
        } else {
            epilogue.store_16bit(out);
        }
    }

    __device__ __forceinline__ void multiply_keys(Logits& logits) const {
        constexpr int kNoStride = 16;
        const SwizzledOperand q(memory.q() + warpgroup * 64 * kPanelRowBytes, kNoStride), k(memory.k(block), kNoStride);
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

    __device__ __forceinline__ VisibleBits<Config::kKeys / 2> visible_bits() const {
        const int pack_shift = args.first.schedule.pack_shift;
        const auto find = [&](const BlockDescriptor& keys) {
            return sm90::visible_bits<Config::kKeys / 2>(keys, row_of(thread), pack_shift, first_column());
        };
        auto bits = find(memory.descriptor(block));
        if (memory.descriptor(block).has_packed_tail)
            bits.add(find(memory.packed_tail(block)));
        return bits;
    }

    // Turns logits into probabilities. Returns true if the output so far has to be multiplied by rows.correction.
    template <bool kMasked>
    __device__ __forceinline__ bool softmax(Logits& logits, RowState& rows) const {
        if constexpr (Config::kSoftCap)
            cap_logits(logits, args.logit_scale, args.cap_log2);
        if constexpr (kMasked)
            apply_mask(logits, visible_bits());
        const bool rescale = rescale_if_needed(logits, rows, to_log2());
        compute_p(logits, rows, to_log2());
        return rescale;
    }
};

}  // namespace jaxmagi::sm90
