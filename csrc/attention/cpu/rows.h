#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/attention/cpu/simd.h"

// Rows of tensors are converted to and from the accumulation type.

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

// IEEE binary16. _Float16 is no alternative: g++ 11 on x86 and g++ 12 on aarch64 lack it, and without F16C it calls
// libgcc. Both conversions are free of branches, so that loops are vectorized, and of subnormal floats, which XLA's
// threads may flush to zero.
struct Float16 {
    uint16_t bits;

    explicit Float16(float x) {
        constexpr float kToSubnormal = 0.5f;  // its last mantissa bit is worth 2^-24, as in a subnormal half
        const uint32_t whole = __builtin_bit_cast(uint32_t, x), magnitude = whole & 0x7fffffff;
        const uint32_t nearest_even = magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1);
        const float shifted = __builtin_bit_cast(float, magnitude) + kToSubnormal;
        const uint32_t subnormal =
            __builtin_bit_cast(uint32_t, shifted) - __builtin_bit_cast(uint32_t, kToSubnormal);
        const uint32_t finite = magnitude < 113u << 23 ? subnormal : nearest_even >> 13;
        const uint32_t beyond = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
        bits = static_cast<uint16_t>((magnitude < 143u << 23 ? finite : beyond) | (whole >> 16 & 0x8000));
    }
    explicit operator float() const {
        constexpr int32_t kRebias = 112 << 23, kSmallest = 113 << 23;  // of exponents; bits of 2^-14
        const int32_t magnitude = (bits & 0x7fff) << 13;
        const float subnormal =
            __builtin_bit_cast(float, magnitude + kSmallest) - __builtin_bit_cast(float, kSmallest);
        const int32_t normal = magnitude + (magnitude < 0x7c00 << 13 ? kRebias : 2 * kRebias);
        const int32_t value = magnitude < 0x400 << 13 ? __builtin_bit_cast(int32_t, subnormal) : normal;
        return __builtin_bit_cast(float, static_cast<uint32_t>(value) | static_cast<uint32_t>(bits & 0x8000) << 16);
    }
};

// One row of one head of one example.
struct RowId {
    int64_t batch, row, head;
};

// Returns the index of a row in [batch, length, heads].
template <typename Pointer> inline int64_t row_index(const TensorAt<Pointer>& tensor, RowId id) {
    return (id.batch * tensor.length + id.row) * tensor.heads + id.head;
}

template <typename Element, typename Pointer> inline auto* row_data(const TensorAt<Pointer>& tensor, RowId id) {
    const int64_t offset = row_index(tensor, id) * tensor.dim;
    if constexpr (requires { static_cast<Element*>(tensor.data); })
        return static_cast<Element*>(tensor.data) + offset;
    else
        return static_cast<const Element*>(tensor.data) + offset;
}

// Calls visit with a pointer of the row's element type. Only double accumulators have double operands.
template <typename T, typename Pointer, typename Visitor>
inline void visit_row(const TensorAt<Pointer>& tensor, RowId id, Visitor visit) {
    if constexpr (sizeof(T) == 8) {
        visit(row_data<double>(tensor, id));
    } else if (tensor.dtype == DType::kF32) {
        visit(row_data<float>(tensor, id));
    } else if (tensor.dtype == DType::kBF16) {
        visit(row_data<BFloat16>(tensor, id));
    } else {
        visit(row_data<Float16>(tensor, id));
    }
}

// into[i * stride] = scale * row[i]
template <typename T> inline void read_row(const Operand& tensor, RowId id, T scale, T* into, int64_t stride) {
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
template <typename T> inline void write_row(const Result& tensor, RowId id, T scale, const T* from, int64_t stride) {
    visit_row<T>(tensor, id, [&]<typename Element>(Element* row) {
        for (int64_t i = 0; i < tensor.dim; ++i)
            row[i] = static_cast<Element>(from[i * stride] * scale);
    });
}

template <typename T> inline void zero_row(const Result& tensor, RowId id) {
    visit_row<T>(tensor, id, [&]<typename Element>(Element* row) {
        for (int64_t i = 0; i < tensor.dim; ++i)
            row[i] = static_cast<Element>(T(0));
    });
}

// Reads `count` rows of one head into a dense [count, dim].
template <typename T> inline void read_rows(const Operand& tensor, RowId first, int count, T* into) {
    for (int i = 0; i < count; ++i)
        read_row(tensor, {first.batch, first.row + i, first.head}, T(1), into + i * tensor.dim, 1);
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
