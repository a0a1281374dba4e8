#pragma once

#include <cstdint>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

// Handlers decode and check buffers and attributes with these functions. A failed check throws std::invalid_argument,
// which `guarded` turns into the handler's error.

namespace jaxmagi {

namespace ffi = xla::ffi;
using Shape = std::vector<int64_t>;

inline Shape shape_of(const ffi::AnyBuffer& buffer) {
    return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

// Each appends a part to a message.
void append(std::ostream& text, const auto& part) {
    text << part;
}

inline void append(std::ostream& text, const Shape& shape) {
    text << "[";
    for (size_t i = 0; i < shape.size(); ++i)
        text << (i ? ", " : "") << shape[i];
    text << "]";
}

// XLA's own operator must not be asked about types that are newer than its header.
inline void append(std::ostream& text, ffi::DataType type) {
    switch (type) {
        case ffi::F64: text << "f64"; break;
        case ffi::F32: text << "f32"; break;
        case ffi::BF16: text << "bf16"; break;
        case ffi::F16: text << "f16"; break;
        case ffi::S32: text << "s32"; break;
        default: text << "XLA type " << static_cast<int>(type);
    }
}

// Returns a message that is put together of all parts.
template <typename... Parts> std::string message_of(const Parts&... parts) {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    (append(text, parts), ...);
    return text.str();
}

// Throws a message that is put together of all parts.
template <typename... Parts> [[noreturn]] void fail(const Parts&... parts) {
    throw std::invalid_argument(message_of(parts...));
}

// Fails with a message unless `holds`. Only then is it put together, since a handler checks much in the few
// microseconds in which it launches its kernels.
template <typename... Parts> void check(bool holds, const Parts&... parts) {
    if (not holds)
        fail(parts...);
}

// Returns the value as an int. It is at most 2^30 by default, so that the sum of two fits an int.
inline int to_int(const char* name, int64_t value, int64_t least = 0, int64_t most = int64_t{1} << 30) {
    check(least <= value and value <= most, name, " must be from ", least, " to ", most, ", got ", value);
    return static_cast<int>(value);
}

inline void check_rank(const char* name, const ffi::AnyBuffer& buffer, size_t rank) {
    const Shape shape = shape_of(buffer);
    check(shape.size() == rank, name, " must have rank ", rank, ", got shape ", shape);
}

inline void check_shape(const char* name, const ffi::AnyBuffer& buffer, const Shape& expected) {
    const Shape shape = shape_of(buffer);
    check(shape == expected, name, " must have shape ", expected, ", got ", shape);
}

inline void check_type(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType expected) {
    check(buffer.element_type() == expected, name, " must be ", expected, ", got ", buffer.element_type());
}

inline void check_buffer(const char* name, const ffi::AnyBuffer& buffer, const Shape& shape, ffi::DataType type) {
    check_shape(name, buffer, shape);
    check_type(name, buffer, type);
}

inline ffi::AnyBuffer buffer_at(const ffi::RemainingArgs& operands, size_t index) {
    return operands.get<ffi::AnyBuffer>(index).value();
}

inline ffi::AnyBuffer buffer_at(const ffi::RemainingRets& results, size_t index) {
    return *results.get<ffi::AnyBuffer>(index).value();
}

// The number of members of a struct that has only buffers.
template <typename Buffers> inline constexpr size_t kNumBuffers = sizeof(Buffers) / sizeof(ffi::AnyBuffer);

// Decodes operands or results into the members of a struct that has only buffers. The call must have `before` buffers
// before these and `after` behind them.
template <typename Buffers, typename Call>
Buffers decode_buffers(const Call& call, size_t before = 0, size_t after = 0) {
    const size_t expected = before + kNumBuffers<Buffers> + after;
    constexpr const char* kWhat = std::is_same_v<Call, ffi::RemainingArgs> ? " operands" : " results";
    check(call.size() == expected, "expected ", expected, kWhat, ", got ", call.size());
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        return Buffers{buffer_at(call, before + kIndex)...};
    }(std::make_index_sequence<kNumBuffers<Buffers>>());
}

inline bool is_positive_normal_float(double x) {
    return std::numeric_limits<float>::min() <= x and x <= std::numeric_limits<float>::max();
}

// Kernels divide by the cap in float, on threads that may flush subnormal numbers to zero.
inline void check_soft_cap(double soft_cap) {
    check(soft_cap == 0 or is_positive_normal_float(soft_cap),
          "soft_cap must be a positive normal float, or 0 for none, got ", soft_cap);
}

// Returns what the body returns, or the error of the exception that it throws.
template <typename Body> auto guarded(const char* handler, Body body) {
    using Value = std::invoke_result_t<Body>;
    using Result = std::conditional_t<std::is_void_v<Value>, ffi::Error, ffi::ErrorOr<Value>>;
    try {
        if constexpr (std::is_void_v<Value>) {
            body();
            return ffi::Error::Success();
        } else {
            return Result(body());
        }
    } catch (const std::invalid_argument& error) {
        return Result(ffi::Error::InvalidArgument(std::string(handler) + ": " + error.what()));
    } catch (const std::exception& error) {
        return Result(ffi::Error::Internal(std::string(handler) + ": " + error.what()));
    }
}

}  // namespace jaxmagi
