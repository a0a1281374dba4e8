#pragma once

#include <algorithm>
#include <bit>

#include "csrc/attention/sm90/forward.h"
#include "csrc/common/math.h"

// How the work is cut into items, and the order in which the CTAs take them.
//
// An item has as many rows of logits as a row tile of the plan has positions, all of one key head: some query heads of the
// group (`pack`, a power of two) at each position of a slice of the tile. One head at all positions would do as well, but
// a slice sees fewer keys than the whole tile: less is left over at the edges of bands.

namespace jaxmagi::sm90 {

// Items of a plan are sorted by section, then longest tile first, then by key head. A section is a number of key heads (of
// any example, where one mask serves all) whose keys and values stay in the L2 cache together.
struct ForwardSchedule {
    int num_items, per_plan, per_section, per_key_head;  // items
    int num_tiles;                                       // of one plan
    int key_heads, section, group;  // key heads of a plan and of a section; query heads of a key head
    int pack, pack_shift;           // query heads in an item, and log2 of it
};

struct ForwardItem {
    int plan, rank, key_head;  // key_head among those of the plan, example by example
    int head_in_group, slice;  // the first query head; of the tile
};

// What the keys and values of a section may fill of the L2 cache. All 50 MB would do to find them there, but the fewer
// lines are in flight the better: 8 MB were up to 3 % faster than 32 MB.
inline constexpr int64_t kSectionBytes = int64_t{8} << 20;

// At 16 heads a slice is 8 or 12 positions, less than which no longer saves keys.
inline constexpr int kMaxPackShift = 4;

inline ForwardSchedule make_schedule(const ForwardParams& params, int tile_rows) {
    const int tiles = ceil_div(params.q_len, tile_rows), key_heads = params.batch / params.plans * params.kv_heads;
    const int64_t head_bytes = int64_t{2} * params.kv_len * (params.dim + params.v_dim);
    const int section = static_cast<int>(std::clamp<int64_t>(kSectionBytes / head_bytes, 1, key_heads));
    const int group = params.heads / params.kv_heads, per_key_head = tiles * group;
    const int pack_shift = std::min(std::countr_zero(static_cast<unsigned>(group)), kMaxPackShift);
    return {.num_items = params.batch * params.heads * tiles,
            .per_plan = per_key_head * key_heads,
            .per_section = per_key_head * section,
            .per_key_head = per_key_head,
            .num_tiles = tiles,
            .key_heads = key_heads,
            .section = section,
            .group = group,
            .pack = 1 << pack_shift,
            .pack_shift = pack_shift};
}

JAXMAGI_HOST_DEVICE ForwardItem item_at(const ForwardSchedule& schedule, int index) {
    const int plan = index / schedule.per_plan;
    index -= plan * schedule.per_plan;
    const int first = index / schedule.per_section * schedule.section;
    index -= first * schedule.per_key_head;
    const int rest = schedule.key_heads - first;
    const int heads = (rest < schedule.section ? rest : schedule.section) * schedule.group;
    const int rank = index / heads, head = index - rank * heads;
    const int key_head = head / schedule.group, member = head - key_head * schedule.group;
    const int slice = member & (schedule.pack - 1);
    return {plan, rank, first + key_head, member - slice, slice};
}

}  // namespace jaxmagi::sm90
