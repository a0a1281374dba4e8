#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "csrc/attention/sm90/tile_schedule.h"

namespace jaxmagi::sm90 {

enum class DType { kBF16, kF16 };

// Positions of a tile and keys of a block by which the tile schedule counts the cost of a mask. A CTA works on as many
// rows of logits at a time.
struct TileShape {
    int rows, keys;
};

// Returns the tile of the kernel for these head dimensions. For dimensions without a kernel it returns nothing, and no
// other function may be called.
std::optional<TileShape> forward_tile(int dim, int v_dim);

struct ForwardParams {
    DType dtype;  // of q, k, v, and of out unless out_f32
    bool out_f32;
    int batch, q_len, kv_len, heads, kv_heads, dim, v_dim;
    const void *q, *k, *v;  // [batch, length, heads, dim]
    int num_masks, capacity;  // 1 mask, or one for each example; bands of a mask
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    const float* sinks;  // [heads], -inf for none
    // A partial result to merge with, or nullptr. It has the types of the result and may share its memory.
    const void* previous_out;
    const float* previous_lse;
    void* out;     // [batch, q_len, heads, v_dim]
    float* lse;    // [batch, q_len, heads]
    int* counter;  // workspace
    float scale, soft_cap;  // scale > 0; soft_cap 0 for none
    int num_sms;
};

cudaError_t attention_forward(const ForwardParams& params, cudaStream_t stream);

// Loads the kernels and raises their limit of shared memory; not to be called while a stream is captured.
cudaError_t preload_forward(DType dtype, int dim, int v_dim, bool soft_cap);

}  // namespace jaxmagi::sm90
