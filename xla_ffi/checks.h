#pragma once

#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

// Checks of buffers and attributes. A failed check throws std::invalid_argument, which `guarded` turns into the
// handler's error.

namespace jaxmagi {

using Shape = std::vector<int64_t>;

inline Shape shape_of(const xla::ffi::AnyBuffer& buffer) {
    return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

inline std::string to_string(const Shape& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i)
        text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

inline std::string to_string(double x) {
    std::ostringstream text;  // std::to_string has 1e-50 as 0.000000
    text << x;
    return text.str();
}

inline void check(bool holds, const std::string& message) {
    if (not holds)
        throw std::invalid_argument(message);
}

// By default up to 2^30, so that the sum of two fits an int.
inline int to_int(const char* name, int64_t value, int64_t least = 0, int64_t most = int64_t{1} << 30) {
    check(least <= value and value <= most, std::string(name) + " must be from " + std::to_string(least) + " to " +
                                                std::to_string(most) + ", got " + std::to_string(value));
    return static_cast<int>(value);
}

inline void check_rank(const char* name, const xla::ffi::AnyBuffer& buffer, size_t rank) {
    const Shape shape = shape_of(buffer);
    check(shape.size() == rank,
          std::string(name) + " must have rank " + std::to_string(rank) + ", got shape " + to_string(shape));
}

inline void check_shape(const char* name, const xla::ffi::AnyBuffer& buffer, const Shape& expected) {
    const Shape shape = shape_of(buffer);
    check(shape == expected,
          std::string(name) + " must have shape " + to_string(expected) + ", got " + to_string(shape));
}

inline std::string type_name(xla::ffi::DataType type) {
    switch (type) {
        case xla::ffi::F64: return "f64";
        case xla::ffi::F32: return "f32";
        case xla::ffi::BF16: return "bf16";
        case xla::ffi::F16: return "f16";
        case xla::ffi::S32: return "s32";
        default: return "XLA type " + std::to_string(static_cast<int>(type));
    }
}

inline void check_type(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType expected) {
    check(buffer.element_type() == expected, std::string(name) + " must be " + type_name(expected) + ", got " +
                                                 type_name(buffer.element_type()));
}

inline bool is_positive_normal_float(double x) {
    return std::numeric_limits<float>::min() <= x and x <= std::numeric_limits<float>::max();
}

// Kernels divide by the cap in float, on threads that may take subnormal numbers for zero.
inline void check_soft_cap(double soft_cap) {
    check(soft_cap == 0 or is_positive_normal_float(soft_cap),
          "soft_cap must be a positive normal float, or 0 for none, got " + to_string(soft_cap));
}

// What the body returns, if anything, or how it failed.
template <typename Body> auto guarded(const char* handler, Body body) {
    using xla::ffi::Error;
    using Value = std::invoke_result_t<Body>;
    using Result = std::conditional_t<std::is_void_v<Value>, Error, xla::ffi::ErrorOr<Value>>;
    try {
        if constexpr (std::is_void_v<Value>) {
            body();
            return Error::Success();
        } else {
            return Result(body());
        }
    } catch (const std::invalid_argument& error) {
        return Result(Error::InvalidArgument(std::string(handler) + ": " + error.what()));
    } catch (const std::exception& error) {
        return Result(Error::Internal(std::string(handler) + ": " + error.what()));
    }
}

}  // namespace jaxmagi
