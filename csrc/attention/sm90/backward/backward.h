#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "csrc/attention/sm90/forward/forward.h"

namespace jaxmagi::sm90 {

// Returns the queries of a block and the keys of a tile of the kernel for these head dimensions, for the tile schedule
// by keys. For dimensions without a kernel it returns nullopt, and nothing else may be called.
std::optional<TileShape> backward_tile(int dim, int v_dim);

struct BackwardShape {
    int batch, q_len, kv_len, heads, kv_heads, dim, v_dim;
};

struct BackwardParams {
    DType dtype;  // of q, k, v, dout, and of the gradients that are not f32
    bool dq_f32, key_gradients_f32;
    BackwardShape shape;
    // Query heads in a row of q, dq, dout, lse and delta. The pass computes those of the shape, from the pointers on.
    int row_heads;
    const void* q;               // [batch, q_len, row_heads, dim]
    const void *k, *v;           // [batch, kv_len, kv_heads, dim]
    int num_masks, capacity;     // one mask, or one mask per example
    const ScheduledBand* bands;  // of a tile schedule by keys, and so transposed
    const ScheduledTile* tiles;  // of keys
    const void* dout;            // [batch, q_len, row_heads, v_dim]
    const float* lse;            // [batch, q_len, row_heads]; rows with -inf get and give no gradient
    const float* delta;          // [batch, q_len, row_heads]: rowsum(dout · out) minus the cotangent of lse
    void *dq, *dk, *dv;          // as q, k, v
    uint32_t* drained;           // set when no work is left that another SM could begin with; null if nobody asks
    void* workspace;             // of backward_workspace_bytes(), 16-byte aligned
    float scale, soft_cap;       // scale > 0; soft_cap 0 for none
    bool deterministic;
    bool is_followed;            // whether SMs that have no work item left go on with something else
    int num_sms;                 // for which the work is cut
};

int64_t backward_workspace_bytes(const BackwardShape& shape, int num_masks, bool deterministic);

cudaError_t attention_backward(const BackwardParams& params, cudaStream_t stream);

// The steps of attention_backward(). The second one may be launched several times, also in several streams: all
// launches together do the work once, each on so many SMs. When all of them have ended come the others, which write dk
// and dv, and dq.
cudaError_t prepare_attention_backward(const BackwardParams& params, cudaStream_t stream);
cudaError_t run_attention_backward(const BackwardParams& params, int num_sms, cudaStream_t stream);
cudaError_t finish_key_gradients(const BackwardParams& params, cudaStream_t stream);
cudaError_t finish_query_gradients(const BackwardParams& params, cudaStream_t stream);

// Loads the kernels and raises their limit of shared memory; not allowed while a stream is captured.
cudaError_t preload_backward(DType dtype, int dim, int v_dim, bool soft_cap);

}  // namespace jaxmagi::sm90
