#include "csrc/attention/cpu/backward_schedule.h"

#include <algorithm>
#include <utility>

#include "csrc/attention/cpu/kernel_table.h"
#include "csrc/common/math.h"
#include "csrc/mask/tile_index.h"

namespace jaxmagi::cpu {

BackwardSchedule::BackwardSchedule(const BandTable& table, int64_t batch, int q_len, int kv_len)
    : bands_(tighten_bands(table.data + batch * table.count * 6, table.count, q_len, kv_len)),
      num_turns_(ceil_div(q_len, kTileRows)) {
    const TileIndex chunks(bands_, Axis::kKey, kv_len, kChunkKeys);
    offsets_.push_back(0);
    for (int chunk = 0; chunk < chunks.num_tiles(); ++chunk) {
        add_chunk(chunks.bands_of(chunk), tile_range(chunk, kChunkKeys, kv_len));
        offsets_.push_back(static_cast<int64_t>(visits_.size()));
    }
}

void BackwardSchedule::add_chunk(std::span<const int> ids, Range keys) {
    std::vector<std::pair<int, int>> meetings;  // (query tile, band)
    for (const int id : ids) {
        const Range rows = rows_of_keys(bands_[id], keys);
        for (int tile = rows.begin / kTileRows; tile < ceil_div(rows.end, kTileRows); ++tile)
            meetings.emplace_back(tile, id);
    }
    std::sort(meetings.begin(), meetings.end());
    std::vector<int> of_tile;
    for (size_t i = 0; i < meetings.size(); ++i) {
        of_tile.push_back(meetings[i].second);
        if (i + 1 < meetings.size() and meetings[i + 1].first == meetings[i].first)
            continue;
        add_tile(meetings[i].first, of_tile);
        of_tile.clear();
    }
}

// Extends the last visits of the chunk where it can: a tile of a long causal or full mask differs in nothing from the
// one before, and an entry for every tile of every chunk would be quadratic in the length.
void BackwardSchedule::add_tile(int tile, std::span<const int> ids) {
    const int turn = num_turns_[tile]++;
    if (offsets_.back() < static_cast<int64_t>(visits_.size())) {
        Visits& last = visits_.back();
        const std::span<const int> last_ids(band_ids_.begin() + last.begin, band_ids_.begin() + last.end);
        if (last.query_tiles.end == tile and last.turn == turn and std::ranges::equal(last_ids, ids)) {
            last.query_tiles.end = tile + 1;
            return;
        }
    }
    const auto at = static_cast<int64_t>(band_ids_.size());
    band_ids_.insert(band_ids_.end(), ids.begin(), ids.end());
    visits_.push_back({.query_tiles = {tile, tile + 1},
                       .turn = turn,
                       .begin = at,
                       .end = static_cast<int64_t>(band_ids_.size())});
}

}  // namespace jaxmagi::cpu
