#pragma once

#include <numbers>
#include <optional>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/common/math.h"
#include "csrc/mask/band.h"
#include "xla_ffi/cuda_checks.h"

// What the handlers of attention on CUDA have in common.

namespace jaxmagi {

namespace ffi = xla::ffi;
using Argument = ffi::AnyBuffer;
using OptionalArgument = std::optional<ffi::AnyBuffer>;
using Result = ffi::Result<ffi::AnyBuffer>;
using Stream = ffi::PlatformStream<cudaStream_t>;

inline constexpr size_t kTensorAlignment = 16;  // of TMA and vector loads

inline void check_shape_and_type(const char* name, const Argument& buffer, const Shape& shape, ffi::DataType type) {
    check_shape(name, buffer, shape);
    check_type(name, buffer, type);
}

// Of the kernels of a pass, which `tile` finds by their head dimensions.
inline sm90::TileShape tile_of(std::optional<sm90::TileShape> (*tile)(int, int), int64_t dim, int64_t v_dim) {
    const auto fits = [](int64_t x) { return 0 < x and x <= kUnbounded; };
    const auto found =
        fits(dim) and fits(v_dim) ? tile(static_cast<int>(dim), static_cast<int>(v_dim)) : std::nullopt;
    check(found.has_value(), "no kernel for the head dimensions " + std::to_string(dim) + " (query, key) and " +
                                 std::to_string(v_dim) + " (value)");
    return *found;
}

inline sm90::DType dtype_of(const Argument& q) {
    check(q.element_type() == ffi::BF16 or q.element_type() == ffi::F16,
          "q must be bf16 or f16, got " + type_name(q.element_type()));
    return q.element_type() == ffi::BF16 ? sm90::DType::kBF16 : sm90::DType::kF16;
}

inline void check_tensors(const Argument& q, const Argument& k, const Argument& v) {
    check_rank("q", q, 4);
    const Shape query = shape_of(q);
    check_rank("v", v, 4);
    const Shape value = shape_of(v);
    check_shape_and_type("k", k, {query[0], value[1], value[2], query[3]}, q.element_type());
    check_shape_and_type("v", v, {query[0], value[1], value[2], value[3]}, q.element_type());
    check(value[2] > 0 and query[2] % value[2] == 0,
          "the heads of q must be a multiple of those of k and v, got " + std::to_string(query[2]) + " and " +
              std::to_string(value[2]));
}

inline void check_plan(const Argument& sorted, const Argument& tiles, int64_t batch, int64_t num_tiles) {
    check_rank("sorted", sorted, 3);
    const Shape bands = shape_of(sorted);
    check(bands[0] == 1 or bands[0] == batch, "there must be 1 plan or one for each of " + std::to_string(batch) +
                                                  " examples, got " + std::to_string(bands[0]));
    check_shape_and_type("sorted", sorted, {bands[0], bands[1], 8}, ffi::S32);
    check_shape_and_type("tiles", tiles, {bands[0], num_tiles, 4}, ffi::S32);
}

inline void check_logits(double scale, double soft_cap) {
    check(is_positive_normal_float(scale), "scale must be a positive normal float, got " + to_string(scale));
    check_soft_cap(soft_cap);
    // The kernels work with logits in units of log 2, and of the cap.
    const bool capped = soft_cap > 0;
    const double logit_scale = capped ? scale / soft_cap : scale * std::numbers::log2e;
    check(is_positive_normal_float(logit_scale) and
              (not capped or is_positive_normal_float(soft_cap * std::numbers::log2e)),
          "scale " + to_string(scale) + " and soft_cap " + to_string(soft_cap) + " together leave the range of float");
}

inline int num_ctas(const CudaDevice& device, int64_t sm_margin) {
    check(0 <= sm_margin and sm_margin < device.num_sms,
          "sm_margin must be at least 0 and less than the " + std::to_string(device.num_sms) + " SMs of the " +
              device.name + ", got " + std::to_string(sm_margin));
    return device.num_sms - static_cast<int>(sm_margin);
}

// tensor: the shape of q or k, whose positions and heads are cut into tiles.
inline void check_number_of_tiles(const char* name, const Shape& tensor, int tile_size) {
    const double count = 1.0 * tensor[0] * tensor[2] * ceil_div<int64_t>(tensor[1], tile_size);
    check(count <= kUnbounded, "too many tiles of " + std::to_string(tile_size) + " rows: " + name + " has shape " +
                                   to_string(tensor));
}

}  // namespace jaxmagi
