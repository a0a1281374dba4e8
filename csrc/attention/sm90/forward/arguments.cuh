#pragma once

#include <cuda.h>

#include "csrc/attention/sm90/forward/schedule.cuh"

namespace jaxmagi::sm90 {

struct ForwardTensorMaps {
    CUtensorMap q, k, v;
    CUtensorMap k_part, v_part;  // kPartKeys at a time
    CUtensorMap out;             // 64 rows at a time; only where outputs go through shared memory
};

// Arguments of a forward kernel other than its tensor maps.
struct ForwardArguments {
    ForwardSchedule schedule;
    Tiles subset;
    int tile_step;  // 1, or -1 where `tiles` points to the last tile
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    int* counter;     // number of work items claimed after the first ones
    uint32_t* drained;  // set when no work item is left to claim, or null
    int first_items;  // that CTAs have without a claim: one for each CTA of attention_forward()
    bool helps;       // the CTAs are those of help_attention_forward(), which claim their first work items too
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
