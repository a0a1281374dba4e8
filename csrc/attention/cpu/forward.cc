#include "csrc/attention/cpu/forward.h"

#include "csrc/attention/cpu/dispatch.h"
#include "csrc/attention/cpu/workspace.h"
#include "csrc/common/math.h"
#include "csrc/mask/tile_index.h"

namespace jaxmagi::cpu {
namespace {

struct TiledMask {
    std::vector<Band> bands;
    TileIndex index;

    TiledMask(const BandTable& table, int64_t batch, int q_len, int kv_len)
        : bands(tighten_bands(table.data + batch * table.count * 6, table.count, q_len, kv_len)),
          index(bands, Axis::kQuery, q_len, kTileRows) {}
};

}  // namespace

// There is a work item for each example, head and query tile. The last tiles come first: with causal masks they take
// longest.
void attention_forward(const ForwardParams& params, const Scheduler& scheduler) {
    const int q_len = static_cast<int>(params.q.length), kv_len = static_cast<int>(params.k.length);
    const int64_t heads = params.q.heads;
    std::vector<TiledMask> masks;
    for (int64_t batch = 0; batch < params.bands.batch; ++batch)
        masks.emplace_back(params.bands, batch, q_len, kv_len);
    const int64_t num_tiles = ceil_div(q_len, kTileRows);
    const int64_t num_items = params.batch * heads * num_tiles;
    const KernelTable& kernels = kernel_table(params.q.dtype);
    const Workspace workspace(num_workers(scheduler, num_items),
                              kernels.forward_workspace_bytes(params.q.dim, params.v.dim));

    parallel_for(scheduler, num_items, [&](int64_t item, int worker) {
        const int tile = static_cast<int>(num_tiles - 1 - item % num_tiles);
        const int64_t head = item / num_tiles % heads, batch = item / num_tiles / heads;
        const TiledMask& mask = masks[params.bands.batch == 1 ? 0 : batch];
        const auto ids = mask.index.bands_of(tile);
        kernels.forward_tile({.params = &params,
                              .batch = batch,
                              .head = head,
                              .rows = tile_range(tile, kTileRows, q_len),
                              .visible = {mask.bands.data(), ids.data(), static_cast<int>(ids.size())}},
                             workspace.piece(worker));
    });
}

}  // namespace jaxmagi::cpu
