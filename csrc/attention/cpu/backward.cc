#include "csrc/attention/cpu/backward.h"

#include <atomic>
#include <memory>

#include "csrc/attention/cpu/backward_schedule.h"
#include "csrc/attention/cpu/dispatch.h"
#include "csrc/attention/cpu/workspace.h"
#include "csrc/common/math.h"

// One item per (key chunk, example, key head), in this order: it owns dK and dV of its keys, and visits the query
// tiles of every query head of the group. dQ of a tile is a sum over chunks, taken in ascending order of the chunks:
// a visit waits for its turn. The chunk before has a smaller item number, so it has been claimed by a thread that
// runs (parallel.h), and the order makes neighbouring items work on different heads where there are several. After
// these items comes one per query tile, for the tiles that no chunk visits.

namespace jaxmagi::cpu {
namespace {

class Backward {
public:
    Backward(const BackwardParams& params, const Scheduler& scheduler)
        : params_(params), scheduler_(scheduler), q_len_(static_cast<int>(params.q.length)),
          kv_len_(static_cast<int>(params.k.length)), num_tiles_(ceil_div(q_len_, kTileRows)),
          num_chunks_(ceil_div(kv_len_, kChunkKeys)), kernels_(kernel_table(params.q.dtype)),
          num_query_grads_(params.batch * params.q.heads * num_tiles_),
          query_grads_(num_query_grads_, accumulator_bytes() * params.q.dim * kTileRows),
          turns_(new std::atomic<int>[num_query_grads_]()) {
        for (int64_t batch = 0; batch < params.bands.batch; ++batch)
            schedules_.emplace_back(params.bands, batch, q_len_, kv_len_);
    }

    void run() {
        const int64_t num_chunk_items = num_chunks_ * params_.batch * params_.k.heads;
        const int64_t num_items = num_chunk_items + num_query_grads_;
        const Workspace workspace(num_workers(scheduler_, num_items),
                                  kernels_.backward_workspace_bytes(params_.q.dim, params_.v.dim));
        parallel_for(scheduler_, num_items, [&](int64_t item, int worker) {
            if (item < num_chunk_items)
                run_chunk(item, workspace.piece(worker));
            else
                clear_unvisited(item - num_chunk_items);
        });
    }

private:
    void run_chunk(int64_t item, void* workspace) {
        const int64_t kv_heads = params_.k.heads, group = params_.q.heads / kv_heads;
        const int chunk = static_cast<int>(item / kv_heads / params_.batch);
        const KeyChunk keys{.params = &params_,
                            .batch = item / kv_heads % params_.batch,
                            .kv_head = item % kv_heads,
                            .keys = tile_range(chunk, kChunkKeys, kv_len_)};
        kernels_.load_chunk(keys, workspace);
        for (int64_t head = keys.kv_head * group; head < (keys.kv_head + 1) * group; ++head)
            for (const Visits& visits : schedule_of(keys.batch).visits_of(chunk))
                for (int tile = visits.query_tiles.begin; tile < visits.query_tiles.end; ++tile)
                    visit_tile(keys, head, tile, visits, workspace);
        kernels_.store_chunk(keys, workspace);
    }

    void visit_tile(const KeyChunk& keys, int64_t head, int query_tile, const Visits& visits, void* workspace) {
        const BackwardSchedule& schedule = schedule_of(keys.batch);
        const BackwardTile tile{.chunk = keys,
                                .head = head,
                                .rows = tile_range(query_tile, kTileRows, q_len_),
                                .visible = {schedule.bands().data(), schedule.band_ids() + visits.begin,
                                            static_cast<int>(visits.end - visits.begin)}};
        kernels_.visit_tile(tile, workspace);
        const int64_t index = (keys.batch * params_.q.heads + head) * num_tiles_ + query_tile;
        std::atomic<int>& turn = turns_[index];
        for (int seen = turn.load(); seen != visits.turn; seen = turn.load())
            turn.wait(seen);
        const QueryGrad grad{.sum = query_grads_.piece(index),
                             .first = visits.turn == 0,
                             .last = visits.turn == schedule.num_turns(query_tile) - 1};
        kernels_.add_query_grad(tile, grad, workspace);
        turn.store(visits.turn + 1);
        turn.notify_all();
    }

    // Tiles of padding rows, which no chunk visits, still have a dQ.
    void clear_unvisited(int64_t index) {
        const int tile = static_cast<int>(index % num_tiles_);
        const int64_t head = index / num_tiles_ % params_.q.heads, batch = index / num_tiles_ / params_.q.heads;
        if (schedule_of(batch).num_turns(tile) == 0)
            kernels_.clear_query_grad(params_, batch, head, tile_range(tile, kTileRows, q_len_));
    }

    int64_t accumulator_bytes() const { return params_.q.dtype == DType::kF64 ? 8 : 4; }
    const BackwardSchedule& schedule_of(int64_t batch) const {
        return schedules_[params_.bands.batch == 1 ? 0 : batch];
    }

    const BackwardParams& params_;
    const Scheduler& scheduler_;
    const int q_len_, kv_len_, num_tiles_, num_chunks_;
    const KernelTable& kernels_;
    const int64_t num_query_grads_;
    const Workspace query_grads_;
    const std::unique_ptr<std::atomic<int>[]> turns_;
    std::vector<BackwardSchedule> schedules_;
};

}  // namespace

void attention_backward(const BackwardParams& params, const Scheduler& scheduler) {
    Backward(params, scheduler).run();
}

}  // namespace jaxmagi::cpu
