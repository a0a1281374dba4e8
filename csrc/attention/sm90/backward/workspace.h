#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/attention/sm90/backward/row_statistics.h"
#include "csrc/common/math.h"
#include "csrc/common/sm90/panel.h"
#include "csrc/mask/band.h"

// The global memory that the kernels of one backward pass share.

namespace jaxmagi::sm90 {

struct BackwardWorkspace {
    int row_block;      // rows of a row block
    int rows_per_head;  // with padding
    int key_tiles;
    int64_t dq_panel;  // floats of a panel of transposed sums
    // The next three, dq, counter and additions, are contiguous and have to be set to zero.
    float* dq;     // [batch, heads, rows_per_head · dim of the kernel], or [panels, batch, heads, rows_per_head · 64]
                   // where has_transposed_sums
    int* counter;  // number of claimed work items
    int* additions;  // [batch, heads, blocks of queries]: how many additions to dq are done. Deterministic runs only
    int64_t bytes_to_clear;
    EightRows* rows;  // [batch, heads, rows_per_head / 8]
    Range* band_ranges;  // [num_masks, blocks of queries]: the bands that touch a block. Deterministic runs only
    int* tile_ranks;     // [num_masks, key_tiles]: index of a tile in the tile schedule. Deterministic runs only
    int64_t bytes;
};

// Returns the rows of a head with padding. Blocks of queries begin at multiples of their length or, where sums are
// transposed and their order is not fixed, at multiples of 8.
inline int padded_rows(int q_len, int block_rows, bool deterministic) {
    const bool anywhere = has_transposed_sums(row_block_of(block_rows)) and not deterministic;
    return anywhere ? round_up(q_len, 8) - 8 + block_rows : round_up(q_len, block_rows);
}

// Returns the layout of the workspace at base, which may be nullptr if only `bytes` is wanted.
inline BackwardWorkspace lay_out(char* base, const BackwardShape& shape, TileShape tile, int kernel_dim, int num_masks,
                                 bool deterministic) {
    const int rows_per_head = padded_rows(shape.q_len, tile.rows, deterministic);
    const int64_t all_rows = int64_t{shape.batch} * shape.heads * rows_per_head;
    const int64_t additions = deterministic ? all_rows / tile.rows : 0;
    const int64_t band_ranges = deterministic ? int64_t{num_masks} * (rows_per_head / tile.rows) : 0;
    int64_t bytes = 0;
    const auto take = [&](int64_t size) {
        char* const begin = base + bytes;
        bytes += round_up(size, 16);
        return begin;
    };
    BackwardWorkspace layout{.row_block = row_block_of(tile.rows),
                             .rows_per_head = rows_per_head,
                             .key_tiles = ceil_div(shape.kv_len, tile.keys),
                             .dq_panel = all_rows * kPanelColumns};
    layout.dq = reinterpret_cast<float*>(take(all_rows * kernel_dim * sizeof(float)));
    layout.counter = reinterpret_cast<int*>(take(sizeof(int)));
    layout.additions = reinterpret_cast<int*>(take(additions * sizeof(int)));
    layout.bytes_to_clear = bytes;
    layout.rows = reinterpret_cast<EightRows*>(take(all_rows / 8 * sizeof(EightRows)));
    layout.band_ranges = reinterpret_cast<Range*>(take(band_ranges * sizeof(Range)));
    const int64_t tile_ranks = deterministic ? int64_t{num_masks} * layout.key_tiles : 0;
    layout.tile_ranks = reinterpret_cast<int*>(take(tile_ranks * sizeof(int)));
    layout.bytes = bytes;
    return layout;
}

}  // namespace jaxmagi::sm90
