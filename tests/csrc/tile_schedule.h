#pragma once

#include <cstdint>
#include <vector>

#include "csrc/attention/sm90/tile_schedule.h"
#include "csrc/common/math.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {

// A tile schedule on the device.
class TileSchedule {
public:
    // bands: [num_masks, capacity, 6]. `params` has no arrays, and no number of tiles.
    TileSchedule(const std::vector<int32_t>& bands, sm90::TileScheduleParams params, cudaStream_t stream)
        : bands_(bands),
          sorted_(std::vector<sm90::ScheduledBand>(params.num_masks * params.capacity)),
          tiles_(std::vector<sm90::ScheduledTile>(params.num_masks * num_tiles(params))),
          workspace_(std::vector<uint64_t>(
              sm90::tile_schedule_workspace_words(params.num_masks, params.capacity, num_tiles(params)))) {
        params.num_tiles = num_tiles(params);
        params.bands = bands_.data();
        params.sorted = sorted_.data();
        params.tiles = tiles_.data();
        params.workspace = workspace_.data();
        must(make_tile_schedule(params, stream), "scheduling");
    }

    const sm90::ScheduledBand* sorted() const { return sorted_.data(); }
    const sm90::ScheduledTile* tiles() const { return tiles_.data(); }
    std::vector<sm90::ScheduledTile> tiles_on_host() const { return tiles_.to_host(); }

private:
    static int num_tiles(const sm90::TileScheduleParams& params) {
        return ceil_div(params.by_keys ? params.kv_len : params.q_len, params.tile_rows);
    }

    DeviceArray<int32_t> bands_;
    DeviceArray<sm90::ScheduledBand> sorted_;
    DeviceArray<sm90::ScheduledTile> tiles_;
    DeviceArray<uint64_t> workspace_;
};

}  // namespace jaxmagi::test
