#pragma once

#include <cuda.h>

#include "csrc/attention/sm90/backward/schedule.cuh"
#include "csrc/attention/sm90/backward/workspace.h"

namespace jaxmagi::sm90 {

struct BackwardTensorMaps {
    CUtensorMap q, dout, k, v, own_k, own_v;  // tiles before own_end are read by the maps of own keys
};

// The schedules of some tiles, of which one is chosen on the device: choose_schedule.
struct BackwardSchedules { BackwardSchedule head_sets, even_tiles, groups; };

// The arguments of a backward kernel other than its tensor maps.
struct BackwardArguments {
    BackwardSchedules schedules, others;  // of the launch's tiles, and of KeyTiles::kOthers
    WholeGroups whole_groups;
    BackwardWorkspace workspace;
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    int capacity, q_len, kv_len, heads, kv_heads, dim, v_dim;
    void *dk, *dv;
    int own_end;              // where the tiles end that have own keys alone
    const uint32_t* arrived;  // set when CTAs may go on with other tiles, or null (BackwardLaunch)
    int *counter, *others_counter;  // how many work items, or parts of them, are claimed
    uint32_t* drained;        // set when no work item is left to claim, or null
    bool gradients_f32, deterministic;  // gradients_f32: of keys and values
    float logit_scale;        // without soft cap: scale · log2(e); with: scale / cap
    float cap_log2;           // cap · log2(e)
    float scale;
};

// Returns the schedule for the bands of the mask. All CTAs choose the same one.
__device__ __forceinline__ const BackwardSchedule& choose_schedule(const BackwardSchedules& schedules,
                                                                   const BackwardArguments& args) {
    if (args.whole_groups.chosen())
        return schedules.groups;
    const bool even = args.deterministic and are_even(args.tiles, args.workspace.key_tiles);
    return even ? schedules.even_tiles : schedules.head_sets;
}

}  // namespace jaxmagi::sm90
