#pragma once

#include <cstdint>

namespace jaxmagi::cpu {

enum class DType { kF64, kF32, kBF16, kF16 };

// A dense row-major [batch, length, heads, dim].
template <typename Pointer> struct TensorAt {
    Pointer data;
    DType dtype;
    int64_t length, heads, dim;
};
using Operand = TensorAt<const void*>;
using Result = TensorAt<void*>;

// An int32 array [batch, count, 6], with 1 or the operands' batch.
struct BandTable {
    const int32_t* data;
    int64_t batch, count;
};

// lse, sinks, delta and every sum have the accumulation type: double for double operands, float for others.
struct ForwardParams {
    int64_t batch;
    Operand q, k, v;
    Result out;
    BandTable bands;
    const void* sinks;  // [heads of q], -inf for none
    void* lse;          // [batch, length, heads of q]
    double scale, soft_cap;
};

struct BackwardParams {
    int64_t batch;
    Operand q, k, v, dout;
    Result dq, dk, dv;
    BandTable bands;
    const void* lse;
    const void* delta;
    double scale, soft_cap;
};

}  // namespace jaxmagi::cpu
