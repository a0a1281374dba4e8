#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jaxmagi::sm90 {

// Some heads of a dense 16-bit tensor [batch, length, row_heads, dim], dim a multiple of 8: [batch, length, heads, dim]
// from `data` on, which is 16-byte aligned.
struct HeadsTensor {
    const void* data;
    CUtensorMapDataType type;
    int64_t batch, length, heads, row_heads, dim;
};

// Describes loads and stores of panels: 64 numbers of each of some heads at each of some positions. Heads change faster
// than positions; coordinates are (number, head, position, example).
cudaError_t encode_panel_map(const HeadsTensor& tensor, int box_heads, int box_positions, CUtensorMap* map);

}  // namespace jaxmagi::sm90
