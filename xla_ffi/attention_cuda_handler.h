#pragma once

#include <numbers>
#include <optional>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/common/math.h"
#include "csrc/mask/band.h"
#include "xla_ffi/attention_checks.h"
#include "xla_ffi/attention_cuda.h"
#include "xla_ffi/cuda_checks.h"

namespace jaxmagi {

inline constexpr size_t kTensorAlignment = 16;  // for TMA and vector loads

// --- stages ---
// A handler has two stages of one signature: Initialize checks the call and loads its kernels, Execute checks and
// launches, perhaps under stream capture. `Op` has the target's name, its attributes, the conversion of a call to
// the kernels' parameters, and the functions that load and launch the kernels.

template <typename Op>
ffi::Error initialize(cudaStream_t, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      typename Op::Attributes attributes) {
    return guarded(Op::kTarget, [&] {
        hopper_device();
        check_cuda(Op::preload(Op::to_params(operands, results, attributes)), "loading the kernels");
    });
}

template <typename Op>
ffi::Error execute(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   typename Op::Attributes attributes) {
    return guarded(Op::kTarget, [&] {
        hopper_device();
        check_cuda(Op::launch(Op::to_params(operands, results, attributes), stream), "launching the kernels");
    });
}

template <ffi::ExecutionStage kStage, typename Op> auto bind_stage() {
    return ffi::Ffi::Bind<kStage>()
        .template Ctx<ffi::PlatformStream<cudaStream_t>>()
        .RemainingArgs()
        .RemainingRets()
        .template Attrs<typename Op::Attributes>();
}

template <typename Op> CudaHandlers cuda_handlers() {
    XLA_FFI_DEFINE_HANDLER(kInitialize, initialize<Op>, (bind_stage<ffi::ExecutionStage::kInitialize, Op>()));
    XLA_FFI_DEFINE_HANDLER(kExecute, execute<Op>, (bind_stage<ffi::ExecutionStage::kExecute, Op>()),
                           {ffi::Traits::kCmdBufferCompatible});
    return {kInitialize, kExecute};
}

// --- parameters that the kernels of both passes take ---

// Returns the tile of the pass's kernel for these head dimensions.
inline sm90::TileShape find_tile(std::optional<sm90::TileShape> (*tile)(int, int), int dim, int v_dim) {
    const auto found = tile(dim, v_dim);
    check(found.has_value(), "no kernel for the head dimensions ", dim, " (query, key) and ", v_dim, " (value)");
    return *found;
}

inline sm90::DType dtype_of(const ffi::AnyBuffer& q) {
    check(q.element_type() == ffi::BF16 or q.element_type() == ffi::F16,
          "q must be bf16 or f16, got ", q.element_type());
    return q.element_type() == ffi::BF16 ? sm90::DType::kBF16 : sm90::DType::kF16;
}

inline void check_logits(double scale, double soft_cap) {
    check(is_positive_normal_float(scale), "scale must be a positive normal float, got ", scale);
    check_soft_cap(soft_cap);
    // The kernels scale logits to units of log 2, or of the cap.
    const bool capped = soft_cap > 0;
    const double logit_scale = capped ? scale / soft_cap : scale * std::numbers::log2e;
    check(is_positive_normal_float(logit_scale) and
              (not capped or is_positive_normal_float(soft_cap * std::numbers::log2e)),
          "scale ", scale, " and soft_cap ", soft_cap, " together leave the range of float");
}

inline int num_sms(int64_t sm_margin) {
    const CudaDevice& device = current_device();
    check(0 <= sm_margin and sm_margin < device.num_sms,
          "sm_margin must be at least 0 and less than the ", device.num_sms, " SMs of the ", device.name, ", got ",
          sm_margin);
    return device.num_sms - static_cast<int>(sm_margin);
}

// Sets the sizes, in `shape`, the tensors q, k and v, the scale, the cap and the number of SMs.
void set_tensors(auto& params, auto& shape, const auto& operands, const auto& attributes) {
    params.dtype = dtype_of(operands.q);
    check_operands(operands);
    const Shape q = shape_of(operands.q), v = shape_of(operands.v);
    shape.batch = to_int("the batch", q[0], 1);
    shape.q_len = to_int("the length of q", q[1], 1);
    shape.kv_len = to_int("the length of k", v[1], 1);
    shape.heads = to_int("the heads of q", q[2], 1);
    shape.kv_heads = to_int("the heads of k", v[2], 1);
    shape.dim = to_int("the head dimension of q", q[3], 1);
    shape.v_dim = to_int("the head dimension of v", v[3], 1);
    params.q = data_of<const void>("q", operands.q, kTensorAlignment);
    params.k = data_of<const void>("k", operands.k, kTensorAlignment);
    params.v = data_of<const void>("v", operands.v, kTensorAlignment);
    check_logits(attributes.scale, attributes.soft_cap);
    params.scale = static_cast<float>(attributes.scale);
    params.soft_cap = static_cast<float>(attributes.soft_cap);
    params.num_sms = num_sms(attributes.sm_margin);
}

// Returns the number of tiles of a schedule over `length` rows. With a tile at each multiple of tile_rows there may be
// one for each long band, too, if `begins_anywhere`.
inline int num_tiles_of(const ffi::AnyBuffer& tiles, int length, int tile_rows, bool begins_anywhere) {
    check_rank("tiles", tiles, 3);
    const int64_t num_tiles = shape_of(tiles)[1], fewest = ceil_div(length, tile_rows);
    const int64_t most = fewest + (begins_anywhere ? length / sm90::kLongBandRows : 0);
    check(fewest <= num_tiles and num_tiles <= most, "there must be ", fewest, " to ", most, " tiles, got ", num_tiles);
    return static_cast<int>(num_tiles);
}

// Sets the tile schedule, which has `num_tiles` tiles for each mask.
void set_tile_schedule(auto& params, const auto& operands, int batch, int num_tiles) {
    check_rank("sorted", operands.sorted, 3);
    const Shape sorted = shape_of(operands.sorted);
    check(sorted[0] == 1 or sorted[0] == batch, "there must be 1 tile schedule or one for each of ", batch,
          " examples, got ", sorted[0]);
    check_buffer("sorted", operands.sorted, {sorted[0], sorted[1], 8}, ffi::S32);
    check_buffer("tiles", operands.tiles, {sorted[0], num_tiles, 8}, ffi::S32);
    params.num_masks = static_cast<int>(sorted[0]);
    params.capacity = to_int("the number of bands", sorted[1]);
    params.bands = data_of<const sm90::ScheduledBand>("sorted", operands.sorted);
    params.tiles = data_of<const sm90::ScheduledTile>("tiles", operands.tiles);
}

// Checks that the kernels can count the tiles into which the positions and heads of a tensor are cut.
inline void check_num_tiles(const char* name, const ffi::AnyBuffer& tensor, int tile_size) {
    const Shape shape = shape_of(tensor);
    const double count = 1.0 * shape[0] * shape[2] * ceil_div(shape[1], tile_size);
    check(count <= kUnbounded, "too many tiles of ", tile_size, " rows: ", name, " has shape ", shape);
}

}  // namespace jaxmagi
