#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/attention/sm90/backward/row_statistics.h"
#include "csrc/attention/sm90/backward/schedule.cuh"
#include "csrc/attention/sm90/backward/sums_layout.h"
#include "csrc/common/math.h"
#include "csrc/common/sm90/panel.h"
#include "csrc/mask/band.h"

// The global memory that the kernels of one backward pass share.

namespace jaxmagi::sm90 {

struct BackwardWorkspace {
    SumsLayout dq_layout, key_layout;
    int rows_per_head;  // with padding
    int key_tiles;
    int rows_per_key_head;  // as many for each tile as the longest have
    // The next six, from dq to key_additions, are contiguous and have to be set to zero, dk and dv only if work items
    // do not have whole groups.
    float* dq;       // [batch, heads, panels of dq_layout, rows_per_head · columns of a panel]
    // [batch, kv_heads, rows_per_key_head · dim or v_dim of the kernel] (key_sums.cuh). Null where every work item has
    // all query heads of a group.
    float *dk, *dv;
    int* counters;  // [kMostBackwardStages]: how many work items, or parts of them, are claimed
    // [batch, heads, panels of dq_layout, blocks of queries]: how many additions to a block of dq are done, counted at
    // its first panel. Deterministic runs only.
    int* additions;
    int* key_additions;  // [batch, kv_heads, key_tiles]: the same for dk and dv
    int64_t bytes_to_clear;
    EightRows* rows;  // [batch, heads, rows_per_head / 8]
    Range* band_ranges;  // [num_masks, blocks of queries]: the bands that touch a block. Deterministic runs only
    int* tile_ranks;     // [num_masks, key_tiles]: index of a tile in the tile schedule
    // [num_masks, key_tiles]: such indices of own tiles, the longest first, and behind them of the others. Only where
    // there are both.
    int* longest_first;
    int64_t bytes;
};

// Returns the rows of a head with padding. Blocks of queries begin at multiples of their length or, where sums are
// transposed and their order is not fixed, at multiples of 8.
inline int padded_rows(int q_len, int block_rows, bool deterministic) {
    const bool anywhere = query_sums_layout(block_rows).transposed and not deterministic;
    return anywhere ? round_up(q_len, 8) - 8 + block_rows : round_up(q_len, block_rows);
}

// Returns the layout of the workspace at base, which may be nullptr if only `bytes` is wanted.
inline BackwardWorkspace lay_out(char* base, const BackwardShape& shape, TileShape tile, int kernel_dim,
                                 int kernel_v_dim, int num_masks, bool deterministic) {
    const int rows_per_head = padded_rows(shape.q_len, tile.rows, deterministic);
    const int64_t all_rows = int64_t{shape.batch} * shape.heads * rows_per_head;
    const int panels = query_sums_layout(tile.rows).panels(kernel_dim);
    const int64_t additions = deterministic ? all_rows * panels / tile.rows : 0;
    const int64_t band_ranges = deterministic ? int64_t{num_masks} * (rows_per_head / tile.rows) : 0;
    int64_t bytes = 0;
    const auto take = [&](int64_t size) {
        char* const begin = base + bytes;
        bytes += round_up(size, 16);
        return begin;
    };
    BackwardWorkspace layout{.dq_layout = query_sums_layout(tile.rows),
                             .key_layout = key_sums_layout(kernel_dim, tile.keys),
                             .rows_per_head = rows_per_head,
                             .key_tiles = shape.key_tiles,
                             .rows_per_key_head = shape.key_tiles * tile.keys};
    layout.dq = reinterpret_cast<float*>(take(all_rows * kernel_dim * sizeof(float)));
    const int64_t key_heads = int64_t{shape.batch} * shape.kv_heads;
    const bool has_key_sums = may_add_gradients(shape, kernel_dim);
    if (has_key_sums) {
        const int64_t key_rows = key_heads * layout.rows_per_key_head;
        layout.dk = reinterpret_cast<float*>(take(key_rows * kernel_dim * sizeof(float)));
        layout.dv = reinterpret_cast<float*>(take(key_rows * kernel_v_dim * sizeof(float)));
    }
    layout.counters = reinterpret_cast<int*>(take(kMostBackwardStages * sizeof(int)));
    layout.additions = reinterpret_cast<int*>(take(additions * sizeof(int)));
    const int64_t key_additions = deterministic and has_key_sums ? key_heads * layout.key_tiles : 0;
    layout.key_additions = reinterpret_cast<int*>(take(key_additions * sizeof(int)));
    layout.bytes_to_clear = bytes;
    layout.rows = reinterpret_cast<EightRows*>(take(all_rows / 8 * sizeof(EightRows)));
    layout.band_ranges = reinterpret_cast<Range*>(take(band_ranges * sizeof(Range)));
    const int64_t tile_ranks = int64_t{num_masks} * layout.key_tiles;
    layout.tile_ranks = reinterpret_cast<int*>(take(tile_ranks * sizeof(int)));
    layout.longest_first = reinterpret_cast<int*>(take(tile_ranks * sizeof(int)));
    layout.bytes = bytes;
    return layout;
}

}  // namespace jaxmagi::sm90
