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

}  // namespace jaxmagi::sm90
