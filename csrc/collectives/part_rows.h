#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/collectives/transfer_params.h"

// These functions take parts of the heads (xla_ffi/context_parts.h) out of whole rows before transfers of context
// attention, and put them back behind these.

namespace jaxmagi::collectives {

// Rows are needed or not in blocks of so many.
constexpr int kNeededRows = 64;

// A part of the heads of rows [batch, tokens, row_bytes], which begins where `from` points to, and where it goes:
// [batch, rows, part_bytes], of which it becomes `tokens` rows from `to` on. All numbers of bytes are multiples of 16.
struct CopiedRows {
    const void* from;
    void* to;
    int64_t row_bytes, part_bytes;
};

struct CopiedRowsParams {
    CopiedRows arrays[2];  // keys and values
    int64_t batch, tokens, rows;
    // It says for each block of kNeededRows tokens whether the block is needed; null says so for all. Of a block that
    // is not needed, rows are copied if an entry of `sends` has them.
    const uint8_t* needed;
    const Send* sends;  // [batch, entries]
    int entries;
};

cudaError_t copy_part_rows(const CopiedRowsParams& params, cudaStream_t stream);

// Rows of float, [batch, rows, width], and of another type of the same shape. Those from `first` on are rounded to it.
struct RoundedRows {
    const float* from;
    void* to;
    int64_t width;  // a multiple of 8
};

struct RoundedRowsParams {
    RoundedRows arrays[2];
    int64_t batch, rows, first;
    DType dtype;  // of 16 bits
};

// Gradients of a part of the rank's rows: its own, [batch, rows, width], of which the first `tokens` rows count, and
// the sums of those that others have, [batch, tokens, width], where an entry of `sends` says that somebody has. Both
// are added up, to [batch, tokens, row_width] from the pointer on.
struct GradientRows {
    const float *own, *sums;
    void* to;
    int64_t width, row_width;  // multiples of 8
};

struct GradientRowsParams {
    GradientRows arrays[2];
    const Send* sends;  // [batch, entries]
    int entries;
    int64_t batch, tokens, rows;
    DType dtype;  // of `to`: 16 bits
};

cudaError_t add_gradients(const GradientRowsParams& params, cudaStream_t stream);

cudaError_t round_rows(const RoundedRowsParams& params, cudaStream_t stream);

// Loads the kernels, on each device before their first use.
cudaError_t preload_part_rows();

}  // namespace jaxmagi::collectives
