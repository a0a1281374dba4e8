#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/collectives/transfer_params.h"

// Copies before transfers of context attention, whose heads are cut into parts (xla_ffi/context_parts.h).

namespace jaxmagi::collectives {

// Rows of a rank, [batch, tokens, row_bytes], and where they go: [parts, batch, rows, row_bytes / parts], of which they are
// the first `tokens` rows. A part has the bytes of some heads, a multiple of 16.
struct OwnRows {
    const void* from;
    void* to;
    int64_t row_bytes;
};

struct OwnRowsParams {
    OwnRows arrays[2];  // keys and values
    int64_t batch, tokens, rows, parts;
};

cudaError_t copy_own_rows(const OwnRowsParams& params, cudaStream_t stream);

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

cudaError_t round_rows(const RoundedRowsParams& params, cudaStream_t stream);

// Loads the kernels, on each device before their first use.
cudaError_t preload_part_rows();

}  // namespace jaxmagi::collectives
