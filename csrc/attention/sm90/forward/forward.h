#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "csrc/attention/sm90/own_keys.h"
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

// Returns how many of the last own keys may be in a block with received ones.
inline int own_keys_of_blocks(const TileShape& tile) {
    return tile.keys - 1;
}

// Tiles of queries that a call computes: all; those whose rows only see keys before own_len (tile_schedule.h), which
// takes from_last_tile = false; or those with rows that see keys behind it, which takes from_last_tile = true. The
// schedule must be of one mask unless all are computed.
enum class Tiles { kAll, kSeeOwn, kSeeReceived };

// A call may have this many parts, since a warp looks at all of them together.
inline constexpr int kMostForwardParts = 32;

struct ForwardParams {
    DType dtype;  // of q, k, v, and of out unless out_f32
    bool out_f32;
    int batch, q_len, kv_len, heads, kv_heads, dim, v_dim;
    // Heads in a row of q, in one of k and v, and in one of out, lse and the previous result. The pass computes `heads`
    // of them with `kv_heads`, from the pointers on, and in further parts the heads that follow.
    int q_row_heads, kv_row_heads, row_heads;
    // Parts of the heads, which SMs compute one after the other. More than one take claims_all and own keys. Part p has
    // the query heads from p * heads on, kv_heads in arrays of its own, and a counter. An SM that finds no work left in
    // a part goes on with the first one that has arrived by then and has work left, if no other SM of the call has
    // ended, as `drained` tells. Otherwise it ends, and leaves the rest to another call, so that no SM waits.
    int num_parts = 1;
    const uint32_t* num_arrived = nullptr;  // parts whose keys are there, which may grow; null: all
    int key_begin, key_end;  // only keys in between count
    const void* q;           // [batch, q_len, q_row_heads, dim]
    const void *k, *v;       // [num_parts, batch, kv_len, kv_row_heads, dim]
    // Where the rank has its own keys, from the heads of the first part on: blocks of keys that are all own are read
    // there, and k and v have received keys and the last own_keys_of_blocks() own ones. It has length 0 where k and v
    // have all keys.
    OwnKeys own = {};
    int num_masks, capacity;  // 1 mask, or one for each example; bands of a mask
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    Tiles subset;
    bool from_last_tile;  // goes through the schedule from the last tile to the first; there must be one mask
    const float* sinks;  // [num_parts * heads], -inf for none
    // A partial result to merge with, or nullptr. It has the types of the result and may share its memory.
    const void* previous_out;
    const float* previous_lse;
    void* out;     // [batch, q_len, row_heads, v_dim]
    float* lse;    // [batch, q_len, row_heads]
    int* counter;  // workspace: one for each part
    bool counter_is_zero;  // otherwise the call clears them
    bool claims_all;       // also the first work items, which others may have claimed before
    // Set when an SM has no work left to begin with, but for what SMs go on with; null if nobody asks.
    uint32_t* drained;
    float scale, soft_cap;  // scale > 0; soft_cap 0 for none
    int num_sms;
    // Unless it is null, SMs go on with this as they do with further parts, and also when they have begun with a
    // section of the call's own work (schedule.cuh), to which they return behind it. They go on with its first part,
    // too, only if next->num_arrived says that its keys are there. It has other tiles, but the same queries and heads,
    // and claims all from counters of its own that are zero before. The call itself then has one part, and as its keys
    // the own ones of all parts.
    const ForwardParams* next;
};

// The keys of the first part must be there.
cudaError_t attention_forward(const ForwardParams& params, cudaStream_t stream);

// Lets `num_sms` more SMs take part in a call of attention_forward() whose counter was zero before, or in what its SMs
// go on with: they claim work items of it. The two may run in different streams, and in any order. The result is
// complete when both have ended.
cudaError_t help_attention_forward(const ForwardParams& params, int num_sms, cudaStream_t stream);

// A result in float, [rows, heads], to which sinks are to be added, and its place in [rows, row_heads] of 16 bits.
struct UnfinishedResult {
    const float *out, *lse;  // [rows, heads, v_dim], [rows, heads]
    const float* sinks;      // [heads], -inf for none
    void* to_out;            // [rows, row_heads, v_dim]
    float* to_lse;           // [rows, row_heads]
    DType dtype;             // of to_out
    const uint8_t* is_wanted;  // [ceil(q_len / tile_rows)]: whether the rows of a tile are finished; null: all are
    int tile_rows, q_len;      // of each example
    int64_t rows;              // of all
    int heads, row_heads, v_dim;
};

// Finishes the result of passes that had no sinks, over parts of the keys.
cudaError_t finish_attention_forward(const UnfinishedResult& result, cudaStream_t stream);

// Loads the kernels and raises their limit of shared memory; not to be called while a stream is captured.
cudaError_t preload_forward(DType dtype, int dim, int v_dim, bool soft_cap);

// Loads the kernels of finish_attention_forward(); not to be called while a stream is captured.
cudaError_t preload_finish();

}  // namespace jaxmagi::sm90
