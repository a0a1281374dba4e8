#pragma once

// What the backward kernel needs to know of the query rows, in the order in which it reads it: by head, 64 positions
// at a time. Row blocks of a head follow each other, padded to a whole number of blocks of the kernel.

namespace jaxmagi::sm90 {

inline constexpr int kRowBlock = 64;

struct alignas(16) RowBlock {
    float lse_log2[kRowBlock];  // log-sum-exp in units of log 2; +inf for rows that have no logits or do not exist
    float delta[kRowBlock];     // 0 for rows that have no logits or do not exist
    int has_blind_rows;         // rows that exist and have no logits: NaN in them must not spread
    int unused[3];
};

// The gradient of the queries of a row block is summed up in fp32 as the accumulators of the matrix units lie: for
// every 8 columns, 4 numbers of each of 128 threads.

}  // namespace jaxmagi::sm90
