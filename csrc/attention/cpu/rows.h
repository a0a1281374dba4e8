#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/attention/cpu/simd.h"

// Rows of the operands to and from the accumulation type.

namespace jaxmagi::cpu::JAXMAGI_ISA {

struct BFloat16 {
    uint16_t bits;

    explicit BFloat16(float x) {
        const uint32_t whole = __builtin_bit_cast(uint32_t, x);
        const uint32_t nearest_even = whole + 0x7fff + (whole >> 16 & 1);
        bits = static_cast<uint16_t>((x != x ? whole | 0x400000 : nearest_even) >> 16);
    }
    explicit operator float() const { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }
};

// One row of one head of one example.
struct RowId {
    int64_t batch, row, head;
};

inline int64_t row_offset(const Tensor& tensor, RowId id) {
    return ((id.batch * tensor.length + id.row) * tensor.heads + id.head) * tensor.dim;
}

// Calls visit(typed pointer to the row) for the row's element type. A float accumulator never meets double operands.
template <typename T, typename Visitor> inline void visit_row(const Tensor& tensor, RowId id, Visitor visit) {
    const int64_t offset = row_offset(tensor, id);
    if constexpr (sizeof(T) == 8) {
        visit(static_cast<double*>(tensor.data) + offset);
    } else if (tensor.dtype == DType::kF32) {
        visit(static_cast<float*>(tensor.data) + offset);
    } else if (tensor.dtype == DType::kBF16) {
        visit(static_cast<BFloat16*>(tensor.data) + offset);
    } else {
        visit(static_cast<_Float16*>(tensor.data) + offset);
    }
}

// into[i * stride] = scale * row[i]
template <typename T> inline void read_row(const Tensor& tensor, RowId id, T scale, T* into, int64_t stride) {
    visit_row<T>(tensor, id, [&](const auto* row) {
        if (stride == 1)
            for (int64_t i = 0; i < tensor.dim; ++i)
                into[i] = static_cast<T>(row[i]) * scale;
        else
            for (int64_t i = 0; i < tensor.dim; ++i)
                into[i * stride] = static_cast<T>(row[i]) * scale;
    });
}

// row[i] = scale * from[i * stride]
template <typename T> inline void write_row(const Tensor& tensor, RowId id, T scale, const T* from, int64_t stride) {
    visit_row<T>(tensor, id, [&]<typename Element>(Element* row) {
        for (int64_t i = 0; i < tensor.dim; ++i)
            row[i] = static_cast<Element>(from[i * stride] * scale);
    });
}

template <typename T> inline void clear_row(const Tensor& tensor, RowId id) {
    visit_row<T>(tensor, id, [&]<typename Element>(Element* row) {
        for (int64_t i = 0; i < tensor.dim; ++i)
            row[i] = static_cast<Element>(T(0));
    });
}

// [count, dim] rows of one head, side by side with a row stride.
template <typename T>
inline void read_rows(const Tensor& tensor, RowId first, int count, T scale, T* into, int64_t stride) {
    for (int i = 0; i < count; ++i)
        read_row(tensor, {first.batch, first.row + i, first.head}, scale, into + i * stride, 1);
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
