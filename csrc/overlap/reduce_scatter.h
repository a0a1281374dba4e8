#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// A product whose parts are summed over ranks of one host, each of which gets some rows of the sum. Kernels store tiles
// for other ranks into these ranks' memory while they compute the next ones.

namespace jaxmagi::overlap {

enum class OperandType { kBF16, kF16 };

// The sizes of a call: x [examples, ranks, rows, inner] · w [inner, columns] gives this rank y [examples, rows, columns].
// `inner` and `columns` are multiples of 8.
struct ReduceScatterShape {
    int examples, ranks, rank, rows, columns, inner;
};

struct ReduceScatterParams {
    ReduceScatterShape shape;
    OperandType type;
    const void *x, *w;
    bool transposed_w;  // w is [columns, inner]
    void* y;
    char* received;  // memory of `received_bytes`, which the other ranks write to
    uint64_t timeout_ns;
    int num_sms;
};

// The memory in which a rank receives tiles of others: the addresses of that of all ranks; a word that tells which rank,
// counted from 1, this one has waited for too long; the number of tiles that have been claimed; flags, one for each part
// of a tile that arrives; and tiles.
struct ReceivedLayout {
    size_t failure, claimed, flags, tiles, bytes;  // offsets, and the size of all
    int64_t num_flags;
};

ReceivedLayout received_layout(const ReduceScatterShape& shape);

// Computes the product. The addresses of all ranks' memory are known, and what lies between them and tiles was zero
// before any rank began. When the kernel has ended without a failure, no other rank writes to this one any more.
cudaError_t matmul_reduce_scatter(const ReduceScatterParams& params, cudaStream_t stream);

// Loads the kernel, on each device before its first use.
cudaError_t preload_reduce_scatter(OperandType type, bool transposed_w);

}  // namespace jaxmagi::overlap
