#include "csrc/attention/cpu/backward_schedule.h"

#include <algorithm>
#include <utility>

#include "csrc/attention/cpu/kernel_table.h"
#include "csrc/mask/tile_index.h"

namespace jaxmagi::cpu {

BackwardSchedule::BackwardSchedule(const BandTable& table, int64_t batch, int q_len, int kv_len)
    : bands_(tighten_bands(table.data + batch * table.count * 6, table.count, q_len, kv_len)),
      num_turns_((q_len + kTileRows - 1) / kTileRows) {
    const TileIndex chunks(bands_, Axis::kKey, kv_len, kChunkKeys);
    offsets_.push_back(0);
    for (int chunk = 0; chunk < chunks.num_tiles(); ++chunk) {
        add_chunk(chunks.bands_of(chunk), {chunk * kChunkKeys, (chunk + 1) * kChunkKeys});
        offsets_.push_back(static_cast<int64_t>(visits_.size()));
    }
}

void BackwardSchedule::add_chunk(std::span<const int> ids, Range keys) {
    std::vector<std::pair<int, int>> meetings;  // (query tile, band)
    for (const int id : ids) {
        const Range rows = rows_of_keys(bands_[id], keys);
        for (int tile = rows.begin / kTileRows; tile <= (rows.end - 1) / kTileRows; ++tile)
            meetings.emplace_back(tile, id);
    }
    std::sort(meetings.begin(), meetings.end());
    int last_tile = -1;
    for (const auto& [tile, id] : meetings) {
        const auto at = static_cast<int64_t>(band_ids_.size());
        if (tile != last_tile)
            visits_.push_back({.query_tile = tile, .turn = num_turns_[tile]++, .begin = at, .end = at});
        band_ids_.push_back(id);
        visits_.back().end = at + 1;
        last_tile = tile;
    }
}

}  // namespace jaxmagi::cpu
