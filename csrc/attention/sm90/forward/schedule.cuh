#pragma once

#include <algorithm>
#include <bit>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/common/math.h"

// This file cuts the work into work items and orders them.
//
// A work item has as many rows of logits as a tile of the tile schedule has positions, all of one key head: some query
// heads of the group (`pack`, a power of two) at each position of a slice of the tile. One head at all positions would
// do as well, but a slice sees fewer keys than the whole tile, and wastes fewer at the edges of bands.

namespace jaxmagi::sm90 {

// Work items of a mask are sorted by section, then in the order of the tile schedule or against it, then by key head. A
// section is a number of key heads (of any example, where one mask serves all) whose keys and values stay in the L2 cache
// together.
struct ForwardSchedule {
    int num_items, per_mask, per_section, per_key_head;  // numbers of work items
    int num_tiles;                                       // of one mask
    int key_heads, section, group;  // key heads of a mask and of a section; query heads of a key head
    int pack, pack_shift;           // query heads in a work item, and log2 of it
    int slices, per_tile;           // slices of a tile; work items of a tile and key head
};

struct ForwardItem {
    int mask, rank, key_head;  // place of the tile in that order; key_head counts those of the mask, example by example
    int head_in_group, slice;  // first query head in the group; slice of the tile's positions
};

// How much of the L2 cache the keys and values of a section may fill. All 50 MB would do to find them there, but the
// fewer lines are in flight the better: 8 MB were up to 3 % faster than 32 MB.
inline constexpr int64_t kSectionBytes = int64_t{8} << 20;

// At 16 heads a slice has 8 or 12 positions; shorter slices do not save keys.
inline constexpr int kMaxPackShift = 4;

inline ForwardSchedule make_schedule(const ForwardParams& params, int tile_rows) {
    const int tiles = ceil_div(params.q_len, tile_rows), key_heads = params.batch / params.num_masks * params.kv_heads;
    const int64_t head_bytes = int64_t{2} * params.kv_len * (params.dim + params.v_dim);
    const int section = static_cast<int>(std::clamp<int64_t>(kSectionBytes / head_bytes, 1, key_heads));
    const int group = params.heads / params.kv_heads;
    const int pack_shift = std::min(std::countr_zero(static_cast<unsigned>(group)), kMaxPackShift);
    // A tile that is the only one has no slices behind its last position.
    const int slices = ceil_div(std::min(params.q_len, tile_rows), tile_rows >> pack_shift);
    const int per_tile = slices * (group >> pack_shift), per_key_head = tiles * per_tile;
    const int per_mask = key_heads * per_key_head, per_section = section * per_key_head;
    return {.num_items = params.num_masks * per_mask,
            .per_mask = per_mask,
            .per_section = per_section,
            .per_key_head = per_key_head,
            .num_tiles = tiles,
            .key_heads = key_heads,
            .section = section,
            .group = group,
            .pack = 1 << pack_shift,
            .pack_shift = pack_shift,
            .slices = slices,
            .per_tile = per_tile};
}

JAXMAGI_HOST_DEVICE ForwardItem item_at(const ForwardSchedule& schedule, int index) {
    const int mask = index / schedule.per_mask;
    index -= mask * schedule.per_mask;
    const int first = index / schedule.per_section * schedule.section;
    index -= first * schedule.per_key_head;
    const int rest = schedule.key_heads - first;
    const int per_rank = (rest < schedule.section ? rest : schedule.section) * schedule.per_tile;
    const int rank = index / per_rank;
    index -= rank * per_rank;
    const int key_head = index / schedule.per_tile;
    index -= key_head * schedule.per_tile;
    const int heads = index / schedule.slices;
    return {mask, rank, first + key_head, heads << schedule.pack_shift, index - heads * schedule.slices};
}

}  // namespace jaxmagi::sm90
