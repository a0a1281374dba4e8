#pragma once

#include "csrc/mask/band.h"

// What the warps of a forward kernel tell each other in shared memory: tiles, runs of keys, blocks of keys.

namespace jaxmagi::sm90 {

// One row tile, for the consumers and whoever loads and stores for them: kRows rows of logits, which are some heads at
// each of some positions, heads changing faster.
struct alignas(16) TileMessage {
    int num_blocks;          // 0: the rows see nothing; -1: no more tiles
    int row, head, example;  // the first position and the first head
    int key_head;
    unsigned first_run;  // for the scheduler itself
};

// One block of keys, for the consumers. Position r of the tile sees columns [max(first_column, r + lower),
// min(end_column, r + upper)) if row_begin <= r < row_end, and no column otherwise; where not masked, every position
// sees every column.
struct alignas(16) BlockMessage {
    int row_begin, row_end, lower, upper;  // read together
    int first_column, end_column;          // read together
    bool masked;
    bool has_guest;  // whether positions see columns by a second message too
};

// Whose keys they are.
struct KeyHead {
    int head, example;
};

// A band as the positions of a tile see it, counted from the first one.
struct alignas(16) TileBand {
    int row_begin, row_end;  // read together with
    int lower, upper;        // column limits in BlockMessage, for a block that begins at key 0
    int last_row;            // that exists

    __device__ __forceinline__ static TileBand make(const Band& band, int row, int last_row) {
        return {band.q0 - row, band.q1 - row, band.lo + row, min(band.hi, kUnbounded - 1) + row + 1, last_row};
    }

    // Of keys from first_key on, those at columns [begin, end).
    __device__ __forceinline__ BlockMessage block(int first_key, int begin, int end, int block_keys) const {
        const int4 rows = reinterpret_cast<const int4&>(*this);
        const int from = rows.z - first_key, to = min(rows.w - first_key, end);  // so that sums do not overflow
        const bool seen_by_all = rows.x <= 0 and last_row < rows.y and from <= -last_row and to == block_keys;
        return {rows.x, rows.y, from, to, begin, end, not seen_by_all or begin != 0, false};
    }
};

// The keys that the rows of a tile see in one band, for the producer.
struct alignas(16) RunMessage {
    TileBand band;
    Range keys;        // none if the tile has no blocks
    KeyHead head;
    int turn;          // of the tile
    bool first, last;  // of the tile
    bool stop;         // no more tiles
    bool has_guest;    // whether its first block has keys of the next run too
    int given;         // how many of its last keys are in the first block of the run before
};

}  // namespace jaxmagi::sm90
