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
    // Tiles of keys of a mask in the tile schedule. There may be more than ceil(kv_len / keys of a tile) only if the
    // order of sums is not fixed, and with KeyTiles::kAll.
    int key_tiles;
};

// The place of gradients of own tiles to which no other rank adds any. It has the shape and the type of the own keys.
struct FinalGradients {
    void *dk, *dv;
    const uint8_t* is_summed;  // [batch, own tiles]: whether other ranks add to a tile's; null: none has a place here
};

struct BackwardParams {
    DType dtype;  // of q, k, v, dout, and of the gradients that are not f32
    bool dq_f32, key_gradients_f32;
    BackwardShape shape;
    // Query heads in a row of q, dq, dout, lse and delta. The pass computes those of the shape, from the pointers on.
    int row_heads;
    const void* q;               // [batch, q_len, row_heads, dim]
    const void *k, *v;           // [batch, kv_len, kv_heads, dim]
    OwnKeys own;                 // of length 0 where k and v have all; an own tile has keys of these alone
    int num_masks, capacity;     // one mask, or one mask per example
    const ScheduledBand* bands;  // of a tile schedule by keys, and so transposed
    const ScheduledTile* tiles;  // of keys
    const void* dout;            // [batch, q_len, row_heads, v_dim]
    const float* lse;            // [batch, q_len, row_heads]; rows with -inf get and give no gradient
    const float* delta;          // [batch, q_len, row_heads]: rowsum(dout · out) minus the cotangent of lse
    void *dq, *dk, *dv;          // as q, k, v
    FinalGradients final;
    // [kMostBackwardStages], one for each counter, or null if nobody asks. A CTA of a launch that ends sets that of the
    // first stage, which has no work left then that another SM could begin with; later ones may have.
    uint32_t* drained;
    void* workspace;             // of backward_workspace_bytes(), 16-byte aligned
    float scale, soft_cap;       // scale > 0; soft_cap 0 for none
    bool deterministic;
    bool is_part;                // whether other calls have work for SMs that this one has none left for
    int num_sms;                 // for which the work is cut
};

// Tiles of keys: all, or a rank's own ones, which are read from `own`, or the others.
enum class KeyTiles { kAll, kOwn, kOthers };

// Some tiles of some key heads, which are those of all examples that a mask serves.
struct BackwardStage {
    KeyTiles tiles;
    Range key_heads;
    bool is_followed;  // whether SMs that have no work item left go on with something else
};

// How many stages a launch may have, and how many counters and flags there are.
inline constexpr int kMostBackwardStages = 3;

// A launch of the kernel, whose CTAs compute one stage after the other. Stages have consecutive counters, which say
// what is claimed: launches in different streams with the same counter have the same stage, and do its work once
// together.
struct BackwardLaunch {
    BackwardStage stages[kMostBackwardStages];
    int num_stages, first_counter, num_sms;
    // Null, or a flag that says that k and v have received keys. A CTA that finds no work left in the first stage goes
    // on if the flag is set by then. If not, it ends, and leaves the other stages to another launch.
    const uint32_t* arrived = nullptr;
};

int64_t backward_workspace_bytes(const BackwardShape& shape, int num_masks, bool deterministic);

cudaError_t attention_backward(const BackwardParams& params, cudaStream_t stream);

// Returns whether there are such tiles, and how many own ones there are.
bool has_tiles(const BackwardParams& params, KeyTiles tiles);
int num_own_tiles(const BackwardParams& params);

// Returns how many key heads a stage may have.
int num_key_heads(const BackwardParams& params);

// Returns a launch of three stages, or of those from `first_stage` on: own tiles of the first key heads, of which there
// are `num_first_heads`, their other tiles, and all tiles of the other key heads. The first stage alone needs no
// received keys; `arrived` is that of BackwardLaunch.
BackwardLaunch staged_launch(const BackwardParams& params, int num_first_heads, int first_stage, int num_sms,
                             const uint32_t* arrived);

// The steps of attention_backward(). With a fixed order of sums, own tiles of a key head must be launched before the
// others, which then must not begin before no work item of own ones is left to claim. When all launches for some tiles
// have ended, finish_key_gradients() writes dk and dv of these; when all have, finish_query_gradients() writes dq.
cudaError_t prepare_attention_backward(const BackwardParams& params, cudaStream_t stream);
cudaError_t run_attention_backward(const BackwardParams& params, const BackwardLaunch& launch, cudaStream_t stream);
cudaError_t finish_key_gradients(const BackwardParams& params, KeyTiles tiles, cudaStream_t stream);
cudaError_t finish_query_gradients(const BackwardParams& params, cudaStream_t stream);

// Loads the kernels and raises their limit of shared memory; not allowed while a stream is captured.
cudaError_t preload_backward(DType dtype, int dim, int v_dim, bool soft_cap);

}  // namespace jaxmagi::sm90
