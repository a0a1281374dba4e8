#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/attention/sm90/backward.h"
#include "csrc/attention/sm90/backward_rows.h"
#include "csrc/common/math.h"
#include "csrc/mask/band.h"

// What the kernels of one backward pass share.

namespace jaxmagi::sm90 {

struct BackwardWorkspace {
    int row_block;        // rows of a row block
    int blocks_per_head;  // row blocks
    int key_tiles;
    // The first three are to be set to zero, and lie side by side.
    float* dq;     // [batch, heads, blocks_per_head, row_block · dim of the kernel]: see has_transposed_sums
    int* counter;  // of items that were taken
    int* turns;    // [batch, heads, blocks_per_head]: how many additions to dq are done. Deterministic runs only
    int64_t bytes_to_clear;
    void* rows;      // RowBlock<row_block> [batch, heads, blocks_per_head]
    Range* windows;  // [plans, blocks_per_head]: the bands that touch a block of queries. Deterministic runs only
    int* places;     // [plans, key_tiles]: where a tile stands among the planned ones. Deterministic runs only
    int64_t bytes;
};

// base may be nullptr, to learn how many bytes it takes.
inline BackwardWorkspace lay_out(char* base, const BackwardShape& shape, TileShape tile, int kernel_dim, int plans,
                                 bool deterministic) {
    const int row_block = row_block_of(tile.rows);
    const int64_t row_block_bytes = with_row_block(row_block, [](auto rows) { return sizeof(rows); });
    const int blocks = ceil_div(shape.q_len, tile.rows) * (tile.rows / row_block);
    const int64_t all_blocks = int64_t{shape.batch} * shape.heads * blocks;
    int64_t bytes = 0;
    const auto take = [&](int64_t size) {
        char* const begin = base + bytes;
        bytes += round_up(size, 16);
        return begin;
    };
    BackwardWorkspace layout{
        .row_block = row_block, .blocks_per_head = blocks, .key_tiles = ceil_div(shape.kv_len, tile.keys)};
    layout.dq = reinterpret_cast<float*>(take(all_blocks * row_block * kernel_dim * sizeof(float)));
    layout.counter = reinterpret_cast<int*>(take(sizeof(int)));
    layout.turns = reinterpret_cast<int*>(take(deterministic ? all_blocks * sizeof(int) : 0));
    layout.bytes_to_clear = bytes;
    layout.rows = take(all_blocks * row_block_bytes);
    layout.windows = reinterpret_cast<Range*>(take(deterministic ? int64_t{plans} * blocks * sizeof(Range) : 0));
    layout.places = reinterpret_cast<int*>(take(deterministic ? int64_t{plans} * layout.key_tiles * sizeof(int) : 0));
    layout.bytes = bytes;
    return layout;
}

}  // namespace jaxmagi::sm90
