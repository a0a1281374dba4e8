#pragma once

#include <cuda.h>

#include "csrc/attention/sm90/backward/schedule.cuh"
#include "csrc/attention/sm90/backward/workspace.h"

namespace jaxmagi::sm90 {

struct BackwardTensorMaps {
    CUtensorMap q, dout, k, v;
};

// The arguments of a backward kernel other than its tensor maps.
struct BackwardArguments {
    BackwardSchedule head_sets, even_tiles, groups;  // one is chosen on the device: choose_schedule
    WholeGroups whole_groups;
    BackwardWorkspace workspace;
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    int capacity, q_len, kv_len, heads, kv_heads, dim, v_dim;
    void *dk, *dv;
    uint32_t* drained;  // set when no work item is left to claim, or null
    bool gradients_f32, deterministic;  // gradients_f32: of keys and values
    float logit_scale;  // without soft cap: scale · log2(e); with: scale / cap
    float cap_log2;     // cap · log2(e)
    float scale;
};

// Returns the schedule for the bands of the mask. All CTAs choose the same one.
__device__ __forceinline__ const BackwardSchedule& choose_schedule(const BackwardArguments& args) {
    if (args.whole_groups.chosen())
        return args.groups;
    const bool even = args.deterministic and are_even(args.tiles, args.head_sets.num_tiles);
    return even ? args.even_tiles : args.head_sets;
}

}  // namespace jaxmagi::sm90
