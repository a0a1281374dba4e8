#pragma once

#include <cuda.h>

#include "csrc/attention/sm90/forward/schedule.cuh"

namespace jaxmagi::sm90 {

struct ForwardTensorMaps {
    CUtensorMap q;
    CUtensorMap k[2], v[2];            // of the first work and of what CTAs go on with
    CUtensorMap k_part[2], v_part[2];  // kPartKeys at a time
    CUtensorMap out;                   // 64 rows at a time; only where outputs go through shared memory
};

// Tiles that CTAs compute, in work items that they claim.
struct ForwardWork {
    ForwardSchedule schedule;
    Tiles subset;
    const ScheduledTile* tiles;
    int tile_step;  // 1, or -1 where `tiles` points to the last tile
    int first_items;  // that CTAs have without a claim: one for each CTA of attention_forward(), or none
    int keys;         // which of the tensor maps of keys and values
    int* counter;     // number of work items claimed after the first ones
};

// Arguments of a forward kernel other than its tensor maps.
struct ForwardArguments {
    // CTAs go on with `next` if the flag is set then; never if it is null. Both cut the same heads alike.
    ForwardWork first, next;
    const uint32_t* arrived;
    const ScheduledBand* bands;
    uint32_t* drained;  // set when no work item of the first work is left to claim, or null
    bool claims_first;  // CTAs also claim their first work items
    int capacity, q_len, kv_len, row_heads, kv_heads, v_dim;
    int key_begin, key_end;
    const float* sinks;
    const void* previous_out;
    const float* previous_lse;
    void* out;
    float* lse;
    bool out_f32;
    float logit_scale;  // without soft cap: scale · log2(e); with: scale / cap
    float cap_log2;     // cap · log2(e)
};

}  // namespace jaxmagi::sm90
