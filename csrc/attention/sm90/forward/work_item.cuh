#pragma once

#include "csrc/mask/band.h"

// Records that the warps of a forward kernel pass on in shared memory: work items, runs of keys, blocks of keys.

namespace jaxmagi::sm90 {

// Where keys and values are: blocks of keys that begin before split_key have the first of the tensor maps, in which
// `first_key_head` heads come before the part's, and others the second one, in which `first_example` examples do.
struct KeyPlaces {
    int split_key, first_key_head, first_example;
};

// A head in the tensors of keys and values.
struct KeyHead {
    int head, example;
};

// One row tile for one key head: kRows rows of logits, which are some heads at each of some positions. Heads change
// faster than positions.
struct alignas(16) ForwardWorkItem {
    int num_blocks;          // 0: the rows are fully masked; -1: there are no more work items
    int row, head, example;  // first position and first head
    int key_head;
    unsigned first_run;  // only the scheduler reads it
};

// One block of keys, for the consumers. Position r of the tile sees columns [max(first_column, r + lower),
// min(end_column, r + upper)) if row_begin <= r < row_end, and no column otherwise. In a block that is not masked every
// position sees every column.
struct alignas(16) BlockDescriptor {
    int row_begin, row_end, lower, upper;  // read together
    int first_column, end_column;          // read together
    bool masked;
    bool has_packed_tail;  // a second descriptor holds more visible columns
};

// A band with positions counted from the first one of a tile.
struct alignas(16) TileBand {
    int row_begin, row_end;  // read together with the limits
    int lower, upper;        // column limits of BlockDescriptor for a block that begins at key 0
    int last_row;            // last position that exists

    __device__ __forceinline__ static TileBand make(const Band& band, int row, int last_row) {
        return {band.q0 - row, band.q1 - row, band.lo + row, min(band.hi, kUnbounded - 1) + row + 1, last_row};
    }

    // Describes the block whose column 0 is first_key and of which columns [begin, end) count.
    __device__ __forceinline__ BlockDescriptor block(int first_key, int begin, int end, int block_keys) const {
        const int4 rows = reinterpret_cast<const int4&>(*this);
        const int lower = rows.z - first_key, upper = min(rows.w - first_key, end);  // r + upper does not overflow
        const bool all_visible = rows.x <= 0 and last_row < rows.y and lower <= -last_row and upper == block_keys;
        return {rows.x, rows.y, lower, upper, begin, end, not all_visible or begin != 0, false};
    }
};

// The keys that the rows of a tile see in one band, for the producer.
struct alignas(16) ForwardBandRun {
    TileBand band;
    Range keys;        // empty if the work item has no blocks
    KeyHead heads[2];  // by tensor map of keys and values
    int split_key;     // as in KeyPlaces
    int item;          // number of work items that the CTA had before
    bool first, last;  // of the work item
    bool stop;         // there are no more work items
    bool has_packed_tail;  // the first block also holds the tail of the next run
    int packed_keys;       // number of keys at the end of this run that the first block of the run before holds
};

}  // namespace jaxmagi::sm90
