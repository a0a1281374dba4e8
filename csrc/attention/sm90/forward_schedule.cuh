#pragma once

#include "csrc/attention/sm90/forward.h"

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

__device__ __forceinline__ ForwardItem item_at(const ForwardSchedule& schedule, int index) {
    const int per_key_head = schedule.num_tiles * schedule.group, per_plan = per_key_head * schedule.key_heads;
    const int plan = index / per_plan;
    index -= plan * per_plan;
    const int first = index / (per_key_head * schedule.section) * schedule.section;
    index -= first * per_key_head;
    const int heads = min(schedule.section, schedule.key_heads - first) * schedule.group;
    const int rank = index / heads, head = index - rank * heads;
    const int key_head = head / schedule.group;
    return {plan, rank, first + key_head, head - key_head * schedule.group};
}

}  // namespace jaxmagi::sm90
