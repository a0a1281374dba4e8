#pragma once

// What the backward kernel needs to know of the query rows, in the order in which it reads it: by head, one row block
// after the other, padded to a whole number of the kernel's blocks of queries.

namespace jaxmagi::sm90 {

template <int kRows_> struct alignas(16) RowBlock {
    static constexpr int kRows = kRows_;
    float lse_log2[kRows];  // log-sum-exp in units of log 2; +inf for rows that have no logits or do not exist
    float delta[kRows];     // 0 for rows that have no logits or do not exist
    int has_blind_rows;     // rows that exist and have no logits: NaN in them must not spread
    int unused[3];
};

// Rows of a row block, where the kernel's blocks have so many queries: 80, or 64 of 64 or 128.
constexpr int row_block_of(int block_queries) {
    return block_queries == 80 ? 80 : 64;
}

// Calls function(RowBlock) with the type for row blocks of so many rows.
template <typename Function> auto with_row_block(int rows, const Function& function) {
    return rows == 80 ? function(RowBlock<80>{}) : function(RowBlock<64>{});
}

// The gradient of the queries of a row block is summed up in fp32 as the accumulators of the matrix units lie, which
// have 64 rows. Of 64 queries: for every 8 columns, 4 numbers of each of 128 threads. Another number of queries is
// transposed: for every 64 columns (rows of the accumulator) and every 8 queries, 4 numbers of each of 128 threads.
constexpr bool has_transposed_sums(int row_block) {
    return row_block != 64;
}

}  // namespace jaxmagi::sm90
