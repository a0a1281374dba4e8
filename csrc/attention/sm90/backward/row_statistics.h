#pragma once

// How the backward kernel has what belongs to query rows in global memory: by head, one after the other, with so many
// more behind the last one that every block of queries has all of its rows.

namespace jaxmagi::sm90 {

// What it needs to know of eight rows.
struct alignas(16) EightRows {
    float lse_log2[8];       // log-sum-exp in units of log 2; +inf for rows that have no logits or do not exist
    float delta[8];          // 0 for rows that have no logits or do not exist
    int begins_blind_block;  // whether the block that would begin here has rows that exist and have no logits: NaN in
                             // them must not spread
    int unused[3];
};

// Rows of a row block, the part of a block that an accumulator holds, where the kernel's blocks have so many queries:
// 80, or 64 of 64 or 128.
constexpr int row_block_of(int block_queries) {
    return block_queries == 80 ? 80 : 64;
}

// The gradient of the queries is summed up in fp32 as the accumulators of the matrix units lie, which have 64 rows. Of
// a row block of 64 queries: for every 8 columns, 4 numbers of each of 128 threads. Another number of queries is
// transposed: for every 64 columns (rows of the accumulator) and every 8 queries, 4 numbers of each of 128 threads.
// There all queries of the same columns lie side by side, so that a block may begin at any multiple of 8.
constexpr bool has_transposed_sums(int row_block) {
    return row_block != 64;
}

}  // namespace jaxmagi::sm90
