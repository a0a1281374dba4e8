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
    BackwardSchedule schedule;
    BackwardWorkspace workspace;
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    int capacity, q_len, kv_len, heads, kv_heads, dim, v_dim;
    void *dk, *dv;
    bool gradients_f32, deterministic;
    float logit_scale;  // without soft cap: scale · log2(e); with: scale / cap
    float cap_log2;     // cap · log2(e)
    float scale;
};

}  // namespace jaxmagi::sm90
