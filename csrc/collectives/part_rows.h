#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/collectives/transfer_params.h"

// These functions take parts of the heads (xla_ffi/context_parts.h) out of whole rows before transfers of context
// attention or beside them, and put them back behind these.

namespace jaxmagi::collectives {

// Rows are copied or not in blocks of so many.
constexpr int kCopiedBlockRows = 64;

// Heads of rows, `bytes` in each, and where they go. The pointers are to the first heads of the first row. All numbers
// of bytes are multiples of 16.
struct CopiedRows {
    const void* from;
    void* to;
    int64_t from_row_bytes, to_row_bytes, bytes;
};

struct CopiedRowsParams {
    CopiedRows arrays[2];  // keys and values
    int64_t batch, count;        // count: of an example's rows, of which blocks are copied
    int64_t from_rows, to_rows;  // that an example has
    const uint8_t* copied;       // [batch, ceil(count / kCopiedBlockRows)]: which blocks are copied; null: all
};

cudaError_t copy_part_rows(const CopiedRowsParams& params, cudaStream_t stream);

// The first blocks of the rank's rows, and whether each has a row that is sent.
struct SentBlocks {
    uint8_t* is_sent;  // [batch, count]
    int64_t count, rows;  // rows of a block
};

// Finds blocks of which an entry of `sends`, [batch, entries], has a row.
cudaError_t find_sent_blocks(const SentBlocks& blocks, const Send* sends, int entries, int64_t batch,
                             cudaStream_t stream);

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
// are added up, to [batch, tokens, row_width] from the pointer on, which blocks that are not sent have reached before.
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
    SentBlocks blocks;
};

cudaError_t add_gradients(const GradientRowsParams& params, cudaStream_t stream);

cudaError_t round_rows(const RoundedRowsParams& params, cudaStream_t stream);

// Loads the kernels, on each device before their first use.
cudaError_t preload_part_rows();

}  // namespace jaxmagi::collectives
