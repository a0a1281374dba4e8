#include "csrc/attention/cpu/backward_schedule.h"

#include <algorithm>
#include <map>

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
        offsets_.push_back(static_cast<int64_t>(query_tiles_.size()));
    }
}

void BackwardSchedule::add_chunk(std::span<const int> ids, Range keys) {
    std::map<int, std::vector<int>> bands_of_tile;
    for (const int id : ids) {
        const Range rows = rows_of_keys(bands_[id], keys);
        for (int tile = rows.begin / kTileRows; tile < ceil_div(rows.end, kTileRows); ++tile)
            bands_of_tile[tile].push_back(id);
    }
    for (const auto& [tile, tile_ids] : bands_of_tile)
        add_tile(tile, tile_ids);
}

// Extends the last entry of the chunk where it can: neighbouring tiles of a long causal or full mask have equal
// entries, and one for every tile of every chunk would be quadratic in the length.
void BackwardSchedule::add_tile(int tile, std::span<const int> ids) {
    const int turn = num_turns_[tile]++;
    if (offsets_.back() < static_cast<int64_t>(query_tiles_.size())) {
        QueryTiles& last = query_tiles_.back();
        const std::span<const int> last_ids(band_ids_.begin() + last.begin, band_ids_.begin() + last.end);
        if (last.tiles.end == tile and last.turn == turn and std::ranges::equal(last_ids, ids)) {
            last.tiles.end = tile + 1;
            return;
        }
    }
    const auto begin = static_cast<int64_t>(band_ids_.size());
    band_ids_.insert(band_ids_.end(), ids.begin(), ids.end());
    const auto end = static_cast<int64_t>(band_ids_.size());
    query_tiles_.push_back({.tiles = {tile, tile + 1}, .turn = turn, .begin = begin, .end = end});
}

}  // namespace jaxmagi::cpu
