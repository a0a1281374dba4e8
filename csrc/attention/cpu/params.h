#pragma once

#include <cstdint>

namespace jaxmagi::cpu {

enum class DType { kF64, kF32, kBF16, kF16 };

// A dense row-major [batch, length, heads, dim].
struct Tensor {
    void* data;
    DType dtype;
    int64_t length, heads, dim;
};

// int32 [batch, count, 6]; batch is 1 or that of the operands.
struct BandTable {
    const int32_t* data;
    int64_t batch, count;
};

// lse, sinks, delta and every sum are in the accumulation type: double for double operands, else float.
struct ForwardParams {
    int64_t batch;
    Tensor q, k, v, out;
    BandTable bands;
    const void* sinks;  // [heads of q], -inf for none
    void* lse;          // [batch, length, heads of q]
    double scale, soft_cap;
};

struct BackwardParams {
    int64_t batch;
    Tensor q, k, v, dout;
    Tensor dq, dk, dv;
    BandTable bands;
    const void* lse;
    const void* delta;
    double scale, soft_cap;
};

}  // namespace jaxmagi::cpu
