#include "csrc/attention/cpu/backward.h"

#include <atomic>
#include <memory>

#include "csrc/attention/cpu/backward_schedule.h"
#include "csrc/attention/cpu/dispatch.h"
#include "csrc/attention/cpu/workspace.h"
#include "csrc/common/math.h"

// There is a work item for each key chunk, example and key head, in this order: it computes dK and dV of its keys from
// the query tiles of every query head of the group. dQ of a tile is summed over chunks in ascending order: an item
// waits for its turn. The chunk before has a smaller item number, so a running thread has claimed it (parallel.h), and
// neighbouring items work on different heads where there are several. Then there is an item for each query tile, which
// zero-fills dQ of the tiles that no chunk adds to.

namespace jaxmagi::cpu {
namespace {

class Backward {
public:
    Backward(const BackwardParams& params, const Scheduler& scheduler)
        : params_(params), scheduler_(scheduler), q_len_(static_cast<int>(params.q.length)),
          kv_len_(static_cast<int>(params.k.length)), num_tiles_(ceil_div(q_len_, kTileRows)),
          num_chunks_(ceil_div(kv_len_, kChunkKeys)), kernels_(kernel_table(params.q.dtype)),
          num_dq_tiles_(params.batch * params.q.heads * num_tiles_),
          dq_sums_(num_dq_tiles_, (params.q.dtype == DType::kF64 ? 8 : 4) * params.q.dim * kTileRows),
          turns_(new std::atomic<int>[num_dq_tiles_]()) {
        for (int64_t batch = 0; batch < params.bands.batch; ++batch)
            schedules_.emplace_back(params.bands, batch, q_len_, kv_len_);
    }

    void run() {
        const int64_t num_chunk_items = num_chunks_ * params_.batch * params_.k.heads;
        const int64_t num_items = num_chunk_items + num_dq_tiles_;
        const Workspace workspace(num_workers(scheduler_, num_items),
                                  kernels_.backward_workspace_bytes(params_.q.dim, params_.v.dim));
        parallel_for(scheduler_, num_items, [&](int64_t item, int worker) {
            if (item < num_chunk_items)
                run_chunk(item, workspace.piece(worker));
            else
                zero_masked_tile(item - num_chunk_items);
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
            for (const QueryTiles& queries : schedule(keys.batch).query_tiles(chunk))
                for (int tile = queries.tiles.begin; tile < queries.tiles.end; ++tile)
                    run_tile(keys, head, tile, queries, workspace);
        kernels_.store_chunk(keys, workspace);
    }

    void run_tile(const KeyChunk& keys, int64_t head, int query_tile, const QueryTiles& queries, void* workspace) {
        const BackwardSchedule& mask = schedule(keys.batch);
        const BackwardTile tile{.chunk = keys,
                                .head = head,
                                .rows = tile_range(query_tile, kTileRows, q_len_),
                                .visible = {mask.bands().data(), mask.band_ids() + queries.begin,
                                            static_cast<int>(queries.end - queries.begin)}};
        kernels_.backward_tile(tile, workspace);
        const int64_t index = (keys.batch * params_.q.heads + head) * num_tiles_ + query_tile;
        std::atomic<int>& turn = turns_[index];
        for (int current = turn.load(); current != queries.turn; current = turn.load())
            turn.wait(current);
        kernels_.add_dq(tile,
                        {.sum = dq_sums_.piece(index),
                         .first = queries.turn == 0,
                         .last = queries.turn == mask.num_turns(query_tile) - 1},
                        workspace);
        turn.store(queries.turn + 1);
        turn.notify_all();
    }

    void zero_masked_tile(int64_t index) {
        const int tile = static_cast<int>(index % num_tiles_);
        const int64_t head = index / num_tiles_ % params_.q.heads, batch = index / num_tiles_ / params_.q.heads;
        if (schedule(batch).num_turns(tile) == 0)
            kernels_.zero_dq(params_, batch, head, tile_range(tile, kTileRows, q_len_));
    }

    const BackwardSchedule& schedule(int64_t batch) const { return schedules_[params_.bands.batch == 1 ? 0 : batch]; }

    const BackwardParams& params_;
    const Scheduler& scheduler_;
    const int q_len_, kv_len_, num_tiles_, num_chunks_;
    const KernelTable& kernels_;
    const int64_t num_dq_tiles_;
    const Workspace dq_sums_;
    const std::unique_ptr<std::atomic<int>[]> turns_;
    std::vector<BackwardSchedule> schedules_;
};

}  // namespace

void attention_backward(const BackwardParams& params, const Scheduler& scheduler) {
    Backward(params, scheduler).run();
}

}  // namespace jaxmagi::cpu
