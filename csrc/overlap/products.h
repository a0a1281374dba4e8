#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "csrc/collectives/control_block.h"

// Products of matrices with a collective over the ranks of one host, which overlap: kernels store tiles or rows into
// the memory of other ranks, and compute others meanwhile.

namespace jaxmagi::overlap {

enum class OperandType { kBF16, kF16 };

// Weights w are [inner, columns].
enum class Collective {
    kReduceScatter,  // x [examples, ranks, rows, inner] · w = y [examples, rows, columns]: the rank's rows of the sum
    kAllGather,      // x [examples, rows, inner] · w = y [examples, ranks, rows, columns]: of the rows of all ranks
};

// The sizes of a call. `rows` are those of a rank. `inner` and `columns` are multiples of 8.
struct ProductShape {
    int examples, ranks, rank, rows, columns, inner;
};

struct ProductParams {
    ProductShape shape;
    OperandType type;
    const void *x, *w;
    bool transposed_w;  // w is [columns, inner]
    void* y;
    char* received;  // memory of `ReceivedLayout::bytes`, which the other ranks write to
    collectives::ProductCounts* counts;  // in this device's memory, zero; the product does not clear them
    uint64_t timeout_ns;
    int num_sms;
};

// The memory in which a rank receives data of others: the addresses of that of all ranks; a word that tells which rank,
// counted from 1, this one has waited for too long; flags, one for each part that arrives; and the data: tiles of
// products to be added up, or rows.
struct ReceivedLayout {
    size_t failure, flags, data, bytes;  // offsets, and the size of all
    int64_t num_flags;

    // Returns the number of words before the data, from the failure on.
    int64_t num_words() const { return static_cast<int64_t>((data - failure) / sizeof(uint32_t)); }
};

ReceivedLayout received_layout(Collective collective, const ProductShape& shape);

// Computes the product. The counts are zero. The kernel in front of it in the stream, beside which it may begin, stores
// the addresses of all ranks' memory, and makes the words behind them zero before any other rank knows them. When the
// kernels have ended without a failure, no other rank writes to this one any more.
cudaError_t matmul_reduce_scatter(const ProductParams& params, cudaStream_t stream);

// Computes the product under the same conditions. The clusters that begin first push the rank's rows to the others
// before they compute.
cudaError_t all_gather_matmul(const ProductParams& params, cudaStream_t stream);

// Loads the kernels, on each device before their first use.
cudaError_t preload(Collective collective, OperandType type, bool transposed_w);

}  // namespace jaxmagi::overlap
