#pragma once

#include <algorithm>

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/common/math.h"

// How the work is cut into work items, and the order in which the CTAs claim them. A work item is a tile of keys of one
// key head, with all query heads of the group.

namespace jaxmagi::sm90 {

// Work items of a mask are sorted by section, then by rank of their tile, then by key head. A section is a number of
// key heads (of any example, where one mask serves all) whose queries stay in the L2 cache together. It has more where
// the balance of work needs them or, with a fixed order of sums, where tiles would often wait. Ranks are those of the
// tile schedule, longest tile first, or, with a fixed order of sums, those of the positions.
struct BackwardSchedule {
    int num_items, per_mask, per_section;  // numbers of work items
    int num_tiles;                         // of one mask
    int key_heads, section, group;         // key heads of a mask and of a section; query heads of a key head
};

struct BackwardItem {
    int mask, rank, key_head;  // key_head counts those of the mask, example by example
};

// How much of the L2 cache the queries, dO and dQ of a section may fill.
inline constexpr int64_t kBackwardSectionBytes = int64_t{32} << 20;

// How many CTAs with tiles of 128 keys work on one key head at a time with a fixed order of sums, if there are enough
// heads: few, so that they seldom wait, but enough to profit from the L2 cache. With smaller tiles, which read more for
// each product, there are twice as many CTAs: 16k of D 256 takes 1.37 (full) and 1.29 (causal) times the time without a
// fixed order. With 16 of them on a head full would take 1.57, with 64 causal 1.38 to 1.40.
inline constexpr int kBackwardCtasPerHead = 16;

inline BackwardSchedule make_schedule(const BackwardShape& shape, int num_masks, int tile_keys, int num_sms,
                                      bool deterministic) {
    const int tiles = ceil_div(shape.kv_len, tile_keys), key_heads = shape.batch / num_masks * shape.kv_heads;
    const int group = shape.heads / shape.kv_heads;
    const int64_t head_bytes = int64_t{shape.q_len} * group * (6 * shape.dim + 2 * shape.v_dim);
    // In a smaller section, the longest tiles of the last section would end long after the others.
    const int64_t balanced = ceil_div(num_sms * 9 / 10, tiles);
    // Tiles of one head wait for each other, those behind a shared prefix for tiles that are many times as long.
    const int ctas_per_head = kBackwardCtasPerHead * (tile_keys < 128 ? 2 : 1);
    const int64_t seldom_waiting = deterministic ? num_sms / ctas_per_head : 1;
    const int64_t wanted = std::max({int64_t{1}, seldom_waiting, balanced, kBackwardSectionBytes / head_bytes});
    const int sections = std::max(1, key_heads / static_cast<int>(std::min<int64_t>(wanted, key_heads)));
    const int section = ceil_div(key_heads, sections);
    return {.num_items = num_masks * key_heads * tiles,
            .per_mask = key_heads * tiles,
            .per_section = section * tiles,
            .num_tiles = tiles,
            .key_heads = key_heads,
            .section = section,
            .group = group};
}

JAXMAGI_HOST_DEVICE BackwardItem item_at(const BackwardSchedule& schedule, int index) {
    const int mask = index / schedule.per_mask;
    index -= mask * schedule.per_mask;
    const int first = index / schedule.per_section * schedule.section;
    index -= first * schedule.num_tiles;
    const int rest = schedule.key_heads - first, width = rest < schedule.section ? rest : schedule.section;
    const int rank = index / width;
    return {mask, rank, first + index - rank * width};
}

}  // namespace jaxmagi::sm90
