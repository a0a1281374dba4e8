#pragma once

#include "csrc/overlap/sm90/config.cuh"

namespace jaxmagi::overlap {

// The rows of a rank in blocks, which are those of a pair of tiles, and travel in pieces. A flag counts the pieces of a
// block that have arrived.
struct RowBlocks {
    int rows, row_bytes, in_example;

    JAXMAGI_HOST_DEVICE explicit RowBlocks(const ProductShape& shape)
        : rows(shape.rows), row_bytes(shape.inner * kElementBytes), in_example(ceil_div(shape.rows, kPairRows)) {}

    JAXMAGI_HOST_DEVICE int64_t bytes(int block) const {
        const int in_block = rows - block * kPairRows;
        return static_cast<int64_t>(in_block < kPairRows ? in_block : kPairRows) * row_bytes;
    }
    JAXMAGI_HOST_DEVICE uint32_t pieces(int block) const {
        return static_cast<uint32_t>(ceil_div(bytes(block), kPieceBytes));
    }
};

}  // namespace jaxmagi::overlap
