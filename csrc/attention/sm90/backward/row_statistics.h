#pragma once

// The layout of what belongs to query rows in global memory. Rows lie head by head, with padding behind the last row of
// a head, so that every block of queries has all of its rows.

namespace jaxmagi::sm90 {

// Statistics of eight rows.
struct alignas(16) EightRows {
    float lse_log2[8];          // log-sum-exp in units of log 2; +inf for rows that are fully masked or do not exist
    float delta[8];             // 0 for rows that are fully masked or do not exist
    int block_has_masked_rows;  // the block that would begin here has fully masked rows: NaN in them must not spread
    int unused[3];
};

// Returns the rows of a row block, the part of a block of queries that an accumulator holds.
constexpr int row_block_of(int block_queries) {
    return block_queries == 80 ? 80 : 64;
}

// Returns true if the fp32 sums of dQ are transposed. They have the layout of wgmma accumulators, which have 64 rows. A
// row block of 64 queries has, for every 8 columns, 4 numbers of each of 128 threads. A row block of another size is
// transposed: for every 64 columns (rows of the accumulator) and every 8 queries, 4 numbers of each of 128 threads.
// There all queries of the same columns are contiguous, so that a block may begin at any multiple of 8.
constexpr bool has_transposed_sums(int row_block) {
    return row_block != 64;
}

}  // namespace jaxmagi::sm90
