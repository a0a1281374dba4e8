#pragma once

#include <algorithm>

#include "csrc/attention/sm90/forward.h"
#include "csrc/common/math.h"

// The order in which the CTAs take the row tiles of all heads and examples.

namespace jaxmagi::sm90 {

// Items of a plan are sorted by section, then longest tile first, then by head, the query heads of a key head next to
// each other. A section is a number of key heads (of any example, where one mask serves all) whose keys and values stay
// in the L2 cache together.
struct ForwardSchedule {
    int num_items, num_tiles;        // all items; tiles of one plan
    int key_heads, section, group;   // per plan; per section; query heads of a key head
};

struct ForwardItem {
    int plan, rank, key_head, head_in_group;  // key_head among those of the plan, example by example
};

// What the keys and values of a section may fill of the L2 cache. All 50 MB would do to find them there, but the fewer
// lines are in flight the better: 8 MB were up to 3 % faster than 32 MB.
inline constexpr int64_t kSectionBytes = int64_t{8} << 20;

inline ForwardSchedule make_schedule(const ForwardParams& params, int tile_rows) {
    const int tiles = ceil_div(params.q_len, tile_rows), key_heads = params.batch / params.plans * params.kv_heads;
    const int64_t head_bytes = int64_t{2} * params.kv_len * (params.dim + params.v_dim);
    const int64_t section = std::clamp<int64_t>(kSectionBytes / head_bytes, 1, key_heads);
    return {.num_items = params.batch * params.heads * tiles,
            .num_tiles = tiles,
            .key_heads = key_heads,
            .section = static_cast<int>(section),
            .group = params.heads / params.kv_heads};
}

JAXMAGI_HOST_DEVICE ForwardItem item_at(const ForwardSchedule& schedule, int index) {
    const int per_key_head = schedule.num_tiles * schedule.group, per_plan = per_key_head * schedule.key_heads;
    const int plan = index / per_plan;
    index -= plan * per_plan;
    const int first = index / (per_key_head * schedule.section) * schedule.section;
    index -= first * per_key_head;
    const int rest = schedule.key_heads - first;
    const int heads = (rest < schedule.section ? rest : schedule.section) * schedule.group;
    const int rank = index / heads, head = index - rank * heads;
    const int key_head = head / schedule.group;
    return {plan, rank, first + key_head, head - key_head * schedule.group};
}

}  // namespace jaxmagi::sm90
