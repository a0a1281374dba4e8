#pragma once

#include <cuda.h>

#include "csrc/attention/sm90/forward/schedule.cuh"
#include "csrc/attention/sm90/forward/work_item.cuh"

namespace jaxmagi::sm90 {

struct ForwardTensorMaps {
    CUtensorMap q;
    CUtensorMap k[2], v[2];            // of own keys and of parts; of all keys and none without own ones
    CUtensorMap k_part[2], v_part[2];  // kPartKeys at a time
    CUtensorMap out;                   // 64 rows at a time; only where outputs go through shared memory
};

// Tiles that CTAs compute, in work items that they claim.
struct ForwardWork {
    ForwardSchedule schedule;
    Tiles subset;
    const ScheduledTile* tiles;
    int tile_step;  // 1, or -1 where `tiles` points to the last tile
    // Work items that CTAs claim. Those before them they have without a claim: one for each CTA of attention_forward(),
    // or none.
    int claimed_items;
    int* counter;  // number of work items claimed
    // `part` is the number of the part, or -1 where CTAs go on with a first one. `first_head` query heads come before
    // it.
    int part, first_head;
    KeyPlaces keys;
    int kv_heads;  // of the part
    bool asks_for_parts;  // whether the CTA does so behind the work item that it has claimed last
};

// Arguments of a forward kernel other than its tensor maps.
struct ForwardArguments {
    // CTAs begin with `first`, and go on with the first part that has arrived and has work items left. From `first`
    // they go to parts also before its end, and return. `parts` describes part 0, from which the others follow. All cut
    // their heads alike.
    ForwardWork first, parts;
    int num_parts, batch;
    const uint32_t* num_arrived;  // null: all parts have
    const ScheduledBand* bands;
    uint32_t* drained;  // set when a CTA ends; null if nobody asks
    int num_ctas;  // but for helpers
    bool claims_first;  // CTAs also claim their first work items
    int capacity, q_len, kv_len, row_heads, v_dim;
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
