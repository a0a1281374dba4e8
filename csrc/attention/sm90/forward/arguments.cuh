#pragma once

#include <cuda.h>

#include "csrc/attention/sm90/forward/schedule.cuh"

namespace jaxmagi::sm90 {

struct ForwardTensorMaps {
    CUtensorMap q, k, v;
    CUtensorMap k_part, v_part;  // kPartKeys at a time
    CUtensorMap out;             // of a warpgroup; only where outputs go through shared memory
};

// What a forward kernel gets beside its tensor maps.
struct ForwardArguments {
    ForwardSchedule schedule;
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    int* counter;  // of items that were taken beyond the first of each CTA
    int capacity, q_len, kv_len, heads, kv_heads, v_dim;
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
