#pragma once

#include <cuda.h>

#include "csrc/attention/sm90/backward/key_gradients.cuh"
#include "csrc/attention/sm90/backward/schedule.cuh"
#include "csrc/attention/sm90/backward/workspace.h"

namespace jaxmagi::sm90 {

struct BackwardTensorMaps {
    CUtensorMap q, dout, k, v, own_k, own_v;  // tiles before own_end are read by the maps of own keys
};

// kHeadSets cuts work by head sets. So does kEvenTiles, for tiles that are about as long, which matters with a fixed
// order of sums. kWholeGroups has all query heads of a key head in a work item.
enum ScheduleVariant { kHeadSets, kEvenTiles, kWholeGroups };

// The schedules of a stage, of which one is chosen on the device: choose_schedule.
struct BackwardSchedules { BackwardSchedule variants[3]; };

// The arguments of a backward kernel other than its tensor maps.
struct BackwardArguments {
    BackwardSchedules stages[kMostBackwardStages];
    int num_stages;
    WholeGroups whole_groups;
    BackwardWorkspace workspace;
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    int capacity, q_len, heads, kv_heads, dim, v_dim;
    AllKeyGradients gradients;
    int own_end;              // where the tiles end that have own keys alone
    const uint32_t* arrived;  // set when CTAs may go on with the second stage, or null (BackwardLaunch)
    int* counters;            // of stages: how many work items, or parts of them, are claimed
    uint32_t* drained;        // set when no work item of the first stage is left to claim, or null
    bool deterministic;
    float logit_scale;        // without soft cap: scale · log2(e); with: scale / cap
    float cap_log2;           // cap · log2(e)
    float scale;
};

// Chooses the schedules for the bands of the mask. All CTAs choose the same ones.
__device__ __forceinline__ int choose_schedule(const BackwardArguments& args) {
    if (args.whole_groups.chosen())
        return kWholeGroups;
    return args.deterministic and are_even(args.tiles, args.workspace.key_tiles) ? kEvenTiles : kHeadSets;
}

}  // namespace jaxmagi::sm90
