#pragma once

#include <algorithm>

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/common/math.h"

// How the work is cut into work items, and the order in which the CTAs claim them. A work item is a tile of keys of one
// key head, with a head set: as many query heads of the group as heads_of_item says. Where a group has several sets, dK
// and dV of a tile are added up in the workspace. In return few heads are under way at once, whose dQ stays in the L2
// cache, and more items share the last round.

namespace jaxmagi::sm90 {

// Work items of a mask are sorted by section, then by position of their tile, then by head set. A section is a number
// of head sets (of any example, where one mask serves all) whose queries stay in the L2 cache together. It has more where
// the balance of work needs them or, with a fixed order of sums, where tiles would often wait. In the last section the
// longest tiles come first, unless the order of sums is fixed.
struct BackwardSchedule {
    int num_items, per_mask, per_section;  // numbers of work items
    int num_tiles;                         // of one mask
    int head_sets, section;                // head sets of a mask and of a section
    int heads_per_item, sets_per_key_head, group_size;  // query heads; head sets; query heads of a key head
    int longest_first;                     // the first work item from which the longest tiles come first

    // Returns true if dK and dV of a tile are added up in the workspace.
    JAXMAGI_HOST_DEVICE bool adds_gradients() const { return sets_per_key_head > 1; }
};

struct BackwardItem {
    int mask, rank, head_set;  // head_set counts those of the mask, example by example
    bool by_position;          // the rank is the tile's position; otherwise that in the tile schedule, longest first
};

// Returns true if the kernel has code that adds dK and dV up. In kernels of three consumer warpgroups, for head dimension
// 192, ptxas finds no registers for it.
constexpr bool can_add_gradients(int kernel_dim) {
    return kernel_dim != 192;
}

// Returns the query heads of a work item. With groups of 8 heads of dimension 128, causal masks of 8k and 32k read and
// write up to 8 times as many bytes of DRAM if an item has all heads of a group, and take 19 and 9 % longer; with one head
// they take about as long as with two, but there are more sums of dK and dV.
inline int heads_of_item(const BackwardShape& shape, int kernel_dim) {
    const int group = shape.heads / shape.kv_heads;
    return not can_add_gradients(kernel_dim) ? group : group % 2 == 0 ? 2 : 1;
}

// Returns true if a key head has several head sets, so that dK and dV of a tile are added up in the workspace.
inline bool adds_gradients(const BackwardShape& shape, int kernel_dim) {
    return heads_of_item(shape, kernel_dim) < shape.heads / shape.kv_heads;
}

// How much of the L2 cache the queries, dO and dQ of a section may fill.
inline constexpr int64_t kBackwardSectionBytes = int64_t{32} << 20;

// How many CTAs with tiles of 128 keys work on one head set at a time with a fixed order of sums, if there are enough
// heads: few, so that they seldom wait, but enough to profit from the L2 cache. With smaller tiles, which read more for
// each product, there are twice as many CTAs: with all heads of a group in an item, 16k of D 256 took 1.37 (full) and
// 1.29 (causal) times the time without a fixed order; with 16 of them full took 1.57, with 64 causal 1.38 to 1.40.
inline constexpr int kBackwardCtasPerHead = 16;

inline BackwardSchedule make_schedule(const BackwardShape& shape, int num_masks, int kernel_dim, int tile_keys,
                                      int num_sms, bool deterministic) {
    const int group = shape.heads / shape.kv_heads, heads = heads_of_item(shape, kernel_dim), sets = group / heads;
    const int tiles = ceil_div(shape.kv_len, tile_keys), head_sets = shape.batch / num_masks * shape.kv_heads * sets;
    const int64_t set_bytes = int64_t{shape.q_len} * heads * (6 * shape.dim + 2 * shape.v_dim);
    // In a smaller section, the longest tiles of the last section would end long after the others.
    const int64_t balanced = ceil_div(num_sms * 9 / 10, tiles);
    // Tiles of one head wait for each other, those behind a shared prefix for tiles that are many times as long.
    const int ctas_per_head = kBackwardCtasPerHead * (tile_keys < 128 ? 2 : 1);
    const int64_t seldom_waiting = deterministic ? num_sms / ctas_per_head : 1;
    const int64_t wanted = std::max({int64_t{1}, seldom_waiting, balanced, kBackwardSectionBytes / set_bytes});
    const int sections = std::max(1, head_sets / static_cast<int>(std::min<int64_t>(wanted, head_sets)));
    const int section = ceil_div(head_sets, sections);
    const int num_items = num_masks * head_sets * tiles, last_section = (head_sets - 1) % section + 1;
    return {.num_items = num_items,
            .per_mask = head_sets * tiles,
            .per_section = section * tiles,
            .num_tiles = tiles,
            .head_sets = head_sets,
            .section = section,
            .heads_per_item = heads,
            .sets_per_key_head = sets,
            .group_size = group,
            .longest_first = deterministic ? num_items : num_items - last_section * tiles};
}

JAXMAGI_HOST_DEVICE BackwardItem item_at(const BackwardSchedule& schedule, int index) {
    const int mask = index / schedule.per_mask;
    const bool by_position = index < schedule.longest_first;
    index -= mask * schedule.per_mask;
    const int first = index / schedule.per_section * schedule.section;
    index -= first * schedule.num_tiles;
    const int rest = schedule.head_sets - first, width = rest < schedule.section ? rest : schedule.section;
    const int rank = index / width;
    return {mask, rank, first + index - rank * width, by_position};
}

}  // namespace jaxmagi::sm90
