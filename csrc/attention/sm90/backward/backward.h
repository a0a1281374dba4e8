#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/mask/band.h"

namespace jaxmagi::sm90 {

// Returns the queries of a block and the keys of a tile of the kernel for these head dimensions, for the tile schedule
// by keys. For dimensions without a kernel it returns nullopt, and nothing else may be called.
std::optional<TileShape> backward_tile(int dim, int v_dim);

struct BackwardShape {
    int batch, q_len, kv_len, heads, kv_heads, dim, v_dim;
};

// The first of kv_len keys and values where a rank of context attention has them, [batch, length, row_heads, dim]. An
// own tile has keys of these alone.
struct OwnKeys {
    const void *k, *v;
    int length, row_heads;
};

struct BackwardParams {
    DType dtype;  // of q, k, v, dout, and of the gradients that are not f32
    bool dq_f32, key_gradients_f32;
    BackwardShape shape;
    // Query heads in a row of q, dq, dout, lse and delta. The pass computes those of the shape, from the pointers on.
    int row_heads;
    const void* q;               // [batch, q_len, row_heads, dim]
    const void *k, *v;           // [batch, kv_len, kv_heads, dim]
    OwnKeys own;                 // of length 0 where k and v have all
    int num_masks, capacity;     // one mask, or one mask per example
    const ScheduledBand* bands;  // of a tile schedule by keys, and so transposed
    const ScheduledTile* tiles;  // of keys
    const void* dout;            // [batch, q_len, row_heads, v_dim]
    const float* lse;            // [batch, q_len, row_heads]; rows with -inf get and give no gradient
    const float* delta;          // [batch, q_len, row_heads]: rowsum(dout · out) minus the cotangent of lse
    void *dq, *dk, *dv;          // as q, k, v
    // [kBackwardCounters]: set when no work is left that another SM could begin with; null if nobody asks.
    uint32_t* drained;
    void* workspace;             // of backward_workspace_bytes(), 16-byte aligned
    float scale, soft_cap;       // scale > 0; soft_cap 0 for none
    bool deterministic;
    bool is_part;                // whether other calls have work for SMs that this one has none left for
    int num_sms;                 // for which the work is cut
};

// Tiles of keys: all, or a rank's own ones, which are read from `own`, or the others.
enum class KeyTiles { kAll, kOwn, kOthers };

// A launch of the kernel for some tiles. Several in different streams may have the same tiles, and then do their work
// once together.
struct BackwardLaunch {
    KeyTiles tiles;
    bool is_followed;  // whether SMs that have no work item left go on with something else
    int num_sms;
    // Of own tiles: null, or a flag. A CTA that finds no own tile left goes on with the others if the flag is set by
    // then, which says that k and v have the other keys. If not, it ends, and leaves the others to a launch of them.
    const uint32_t* arrived = nullptr;
};

// How many counters and flags there are: KeyTiles::kOthers have their own.
inline constexpr int kBackwardCounters = 2;

inline int counter_of(KeyTiles tiles) {
    return tiles == KeyTiles::kOthers;
}

int64_t backward_workspace_bytes(const BackwardShape& shape, int num_masks, bool deterministic);

cudaError_t attention_backward(const BackwardParams& params, cudaStream_t stream);

// Returns whether there are such tiles.
bool has_tiles(const BackwardParams& params, KeyTiles tiles);

// The steps of attention_backward(). With a fixed order of sums, own tiles must be launched before the others, which
// then must not begin before no work item of own ones is left to claim. When all launches for some tiles have ended,
// finish_key_gradients() writes dk and dv of these; when all have, finish_query_gradients() writes dq.
cudaError_t prepare_attention_backward(const BackwardParams& params, cudaStream_t stream);
cudaError_t run_attention_backward(const BackwardParams& params, const BackwardLaunch& launch, cudaStream_t stream);
cudaError_t finish_key_gradients(const BackwardParams& params, KeyTiles tiles, cudaStream_t stream);
cudaError_t finish_query_gradients(const BackwardParams& params, cudaStream_t stream);

// Loads the kernels and raises their limit of shared memory; not allowed while a stream is captured.
cudaError_t preload_backward(DType dtype, int dim, int v_dim, bool soft_cap);

}  // namespace jaxmagi::sm90
