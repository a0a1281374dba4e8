#pragma once

#include "csrc/common/sm90/panel.h"

// The layout of fp32 sums of gradients in global memory. It is that of wgmma accumulators, which have 64 rows, so that
// a part of them in shared memory is added as it lies.

namespace jaxmagi::sm90 {

// A row block of 64 rows that is not transposed has, for every 8 columns, 4 numbers of each of 128 threads. A
// transposed one has, for every 64 columns (rows of the accumulator) and every 8 rows, 4 numbers of each of 128
// threads; there all rows of the same 64 columns are contiguous, so that a row block may begin at any multiple of 8.
struct SumsLayout {
    int row_block;
    bool transposed;

    constexpr bool operator==(const SumsLayout&) const = default;
    // Returns how many parts, one after the other, the columns of a head are divided into.
    constexpr int panels(int dim) const { return transposed ? sm90::panels(dim) : 1; }
};

// Returns the layout of dQ. A block of queries has one row block or, of 64 rows, several.
constexpr SumsLayout query_sums_layout(int block_queries) {
    return block_queries == 80 ? SumsLayout{80, true} : SumsLayout{64, false};
}

// Returns the layout of dK and dV, which wide kernels, above a head dimension of 128, have transposed.
constexpr SumsLayout key_sums_layout(int kernel_dim, int tile_keys) {
    return kernel_dim > 128 ? SumsLayout{tile_keys, true} : SumsLayout{64, false};
}

}  // namespace jaxmagi::sm90
