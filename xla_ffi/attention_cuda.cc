#include "xla_ffi/attention_cuda.h"

#include <numbers>
#include <optional>

#include "csrc/attention/sm90/forward.h"
#include "csrc/common/math.h"
#include "csrc/mask/band.h"
#include "xla_ffi/cuda_checks.h"

// Handlers come in two stages of one signature: Initialize checks the call and loads its kernels, Execute checks and
// launches, perhaps under stream capture.

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using Argument = ffi::AnyBuffer;
using OptionalArgument = std::optional<ffi::AnyBuffer>;
using Result = ffi::Result<ffi::AnyBuffer>;
using Stream = ffi::PlatformStream<cudaStream_t>;

constexpr size_t kTensorAlignment = 16;  // of TMA and vector loads

int to_int(const char* name, int64_t value, int64_t smallest = 0) {
    check(smallest <= value and value <= kUnbounded,
          std::string(name) + " must be between " + std::to_string(smallest) + " and 2^30, got " +
              std::to_string(value));
    return static_cast<int>(value);
}

void check_shape_and_type(const char* name, const Argument& buffer, const Shape& shape, ffi::DataType type) {
    check_shape(name, buffer, shape);
    check_type(name, buffer, type);
}

sm90::TileShape tile_of(int64_t dim, int64_t v_dim) {
    const auto fits = [](int64_t x) { return 0 < x and x <= kUnbounded; };
    const auto tile = fits(dim) and fits(v_dim)
                          ? sm90::forward_tile(static_cast<int>(dim), static_cast<int>(v_dim))
                          : std::nullopt;
    check(tile.has_value(), "no kernel for the head dimensions " + std::to_string(dim) + " (query, key) and " +
                                std::to_string(v_dim) + " (value)");
    return *tile;
}

// --- the plan ---

constexpr const char* kPlanTarget = "jaxmagi_attention_plan";

sm90::PlanParams to_plan_params(const Argument& bands, const Argument& sorted, const Argument& tiles,
                                const Argument& workspace, int64_t q_len, int64_t kv_len, int64_t dim,
                                int64_t v_dim) {
    check_type("bands", bands, ffi::S32);
    check_rank("bands", bands, 3);
    const Shape shape = shape_of(bands);
    check(shape[2] == 6, "bands must have shape [plans, capacity, 6], got " + to_string(shape));
    const sm90::TileShape tile = tile_of(dim, v_dim);
    const sm90::PlanParams params{
        .bands = data_of<const int32_t>("bands", bands, 2 * sizeof(int32_t)),
        .plans = to_int("the number of plans", shape[0], 1),
        .capacity = to_int("the number of bands", shape[1]),
        .q_len = to_int("q_len", q_len),
        .kv_len = to_int("kv_len", kv_len),
        .tile_rows = tile.rows,
        .block_keys = tile.keys,
        .sorted = data_of<sm90::PlannedBand>("sorted", sorted),
        .tiles = data_of<sm90::PlannedTile>("tiles", tiles),
        .workspace = data_of<uint64_t>("workspace", workspace, alignof(sm90::PlannedTile))};
    check_shape_and_type("sorted", sorted, {shape[0], shape[1], 8}, ffi::S32);
    check_shape_and_type("tiles", tiles, {shape[0], ceil_div(params.q_len, tile.rows), 4}, ffi::S32);
    const int64_t words = sm90::plan_workspace_words(params.plans, params.capacity, params.q_len, tile.rows);
    check_shape_and_type("workspace", workspace, {words, 2}, ffi::S32);
    return params;
}

void initialize_plan(const sm90::PlanParams&, cudaStream_t) {
    check_cuda(sm90::preload_plan(), "loading the kernels");
}

void execute_plan(const sm90::PlanParams& params, cudaStream_t stream) {
    check_cuda(sm90::make_plan(params, stream), "launching the kernels");
}

template <auto kRun>
ffi::Error plan_stage(cudaStream_t stream, Argument bands, Result sorted, Result tiles, Result workspace, int64_t q_len,
                      int64_t kv_len, int64_t dim, int64_t v_dim) {
    return guarded(kPlanTarget, [&] {
        hopper_device();
        kRun(to_plan_params(bands, *sorted, *tiles, *workspace, q_len, kv_len, dim, v_dim), stream);
    });
}

template <ffi::ExecutionStage kStage> auto bind_plan() {
    return ffi::Ffi::Bind<kStage>()
        .template Ctx<Stream>()
        .template Arg<Argument>()        // bands
        .template Ret<ffi::AnyBuffer>()  // sorted
        .template Ret<ffi::AnyBuffer>()  // tiles
        .template Ret<ffi::AnyBuffer>()  // workspace
        .template Attr<int64_t>("q_len")
        .template Attr<int64_t>("kv_len")
        .template Attr<int64_t>("dim")
        .template Attr<int64_t>("v_dim");
}

XLA_FFI_DEFINE_HANDLER(kInitializePlan, plan_stage<initialize_plan>, bind_plan<ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER(kExecutePlan, plan_stage<execute_plan>, bind_plan<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

// --- forward ---

constexpr const char* kForwardTarget = "jaxmagi_attention_forward";

struct ForwardOperands {
    const Argument &q, &k, &v, &bands, &tiles, &sinks;
    const OptionalArgument &previous_out, &previous_lse;
};

struct ForwardResults {
    const Argument &out, &lse, &counter;
};

struct ForwardNumbers {
    double scale, soft_cap;
    int64_t sm_margin;
};

sm90::DType dtype_of(const Argument& q) {
    check(q.element_type() == ffi::BF16 or q.element_type() == ffi::F16,
          "q must be bf16 or f16, got " + type_name(q.element_type()));
    return q.element_type() == ffi::BF16 ? sm90::DType::kBF16 : sm90::DType::kF16;
}

void check_tensors(const Argument& q, const Argument& k, const Argument& v) {
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

void check_plan(const ForwardOperands& operands, sm90::TileShape tile) {
    check_rank("sorted", operands.bands, 3);
    const Shape query = shape_of(operands.q), bands = shape_of(operands.bands);
    check(bands[0] == 1 or bands[0] == query[0], "there must be 1 plan or one for each of " +
                                                      std::to_string(query[0]) + " examples, got " +
                                                      std::to_string(bands[0]));
    check_shape_and_type("sorted", operands.bands, {bands[0], bands[1], 8}, ffi::S32);
    check_shape_and_type("tiles", operands.tiles, {bands[0], ceil_div(query[1], tile.rows), 4}, ffi::S32);
}

void check_results(const ForwardOperands& operands, const ForwardResults& results) {
    const Shape query = shape_of(operands.q), rows{query[0], query[1], query[2]};
    const Shape shape{query[0], query[1], query[2], operands.v.dimensions()[3]};
    check_shape("out", results.out, shape);
    if (results.out.element_type() != ffi::F32)
        check_type("out", results.out, operands.q.element_type());
    check_shape_and_type("lse", results.lse, rows, ffi::F32);
    check_shape_and_type("counter", results.counter, {1}, ffi::S32);
    check(operands.previous_out.has_value() == operands.previous_lse.has_value(),
          "previous_out and previous_lse must come together");
    if (operands.previous_out) {
        check_shape_and_type("previous_out", *operands.previous_out, shape, results.out.element_type());
        check_shape_and_type("previous_lse", *operands.previous_lse, rows, ffi::F32);
    }
}

void check_numbers(const ForwardNumbers& numbers) {
    check(is_positive_normal_float(numbers.scale),
          "scale must be a positive normal float, got " + to_string(numbers.scale));
    check_soft_cap(numbers.soft_cap);
    // The kernels work with logits in units of log 2, and of the cap.
    const bool capped = numbers.soft_cap > 0;
    const double logit_scale = capped ? numbers.scale / numbers.soft_cap : numbers.scale * std::numbers::log2e;
    check(is_positive_normal_float(logit_scale) and
              (not capped or is_positive_normal_float(numbers.soft_cap * std::numbers::log2e)),
          "scale " + to_string(numbers.scale) + " and soft_cap " + to_string(numbers.soft_cap) +
              " together leave the range of float");
}

int num_ctas(const CudaDevice& device, int64_t sm_margin) {
    check(0 <= sm_margin and sm_margin < device.num_sms,
          "sm_margin must be at least 0 and less than the " + std::to_string(device.num_sms) + " SMs of the " +
              device.name + ", got " + std::to_string(sm_margin));
    return device.num_sms - static_cast<int>(sm_margin);
}

void check_number_of_tiles(const Shape& query, sm90::TileShape tile) {
    const double count = 1.0 * query[0] * query[2] * ceil_div(query[1], tile.rows);
    check(count <= kUnbounded,
          "too many tiles of " + std::to_string(tile.rows) + " rows: q has shape " + to_string(query));
}

template <typename Element>
Element* data_or_null(const char* name, const OptionalArgument& buffer, size_t alignment) {
    return buffer ? data_of<Element>(name, *buffer, alignment) : nullptr;
}

sm90::ForwardParams to_forward_params(const ForwardOperands& operands, const ForwardResults& results,
                                      const ForwardNumbers& numbers) {
    const CudaDevice& device = hopper_device();
    const sm90::DType dtype = dtype_of(operands.q);
    check_tensors(operands.q, operands.k, operands.v);
    const Shape query = shape_of(operands.q), value = shape_of(operands.v);
    const sm90::TileShape tile = tile_of(query[3], value[3]);
    check_plan(operands, tile);
    check_shape_and_type("sinks", operands.sinks, {query[2]}, ffi::F32);
    check_results(operands, results);
    check_numbers(numbers);
    check_number_of_tiles(query, tile);
    const Shape bands = shape_of(operands.bands);
    return {.dtype = dtype,
            .out_f32 = results.out.element_type() == ffi::F32,
            .batch = to_int("the batch", query[0], 1),
            .q_len = to_int("the length of q", query[1], 1),
            .kv_len = to_int("the length of k", value[1], 1),
            .heads = to_int("the heads of q", query[2], 1),
            .kv_heads = to_int("the heads of k", value[2], 1),
            .dim = static_cast<int>(query[3]),
            .v_dim = static_cast<int>(value[3]),
            .q = data_of<const void>("q", operands.q, kTensorAlignment),
            .k = data_of<const void>("k", operands.k, kTensorAlignment),
            .v = data_of<const void>("v", operands.v, kTensorAlignment),
            .plans = static_cast<int>(bands[0]),
            .capacity = to_int("the number of bands", bands[1]),
            .bands = data_of<const sm90::PlannedBand>("bands", operands.bands),
            .tiles = data_of<const sm90::PlannedTile>("tiles", operands.tiles),
            .sinks = data_of<const float>("sinks", operands.sinks),
            .previous_out = data_or_null<const void>("previous_out", operands.previous_out, kTensorAlignment),
            .previous_lse = data_or_null<const float>("previous_lse", operands.previous_lse, alignof(float)),
            .out = data_of<void>("out", results.out, kTensorAlignment),
            .lse = data_of<float>("lse", results.lse),
            .counter = data_of<int>("counter", results.counter),
            .scale = static_cast<float>(numbers.scale),
            .soft_cap = static_cast<float>(numbers.soft_cap),
            .num_sms = num_ctas(device, numbers.sm_margin)};
}

void initialize_forward(const sm90::ForwardParams& params, cudaStream_t) {
    check_cuda(sm90::preload_forward(params.dtype, params.dim, params.v_dim, params.soft_cap > 0),
               "loading the kernels");
}

void execute_forward(const sm90::ForwardParams& params, cudaStream_t stream) {
    check_cuda(sm90::attention_forward(params, stream), "launching the kernel");
}

template <auto kRun>
ffi::Error forward_stage(cudaStream_t stream, Argument q, Argument k, Argument v, Argument bands, Argument tiles,
                         Argument sinks, OptionalArgument previous_out, OptionalArgument previous_lse, Result out,
                         Result lse, Result counter, double scale, double soft_cap, int64_t sm_margin) {
    return guarded(kForwardTarget, [&] {
        kRun(to_forward_params({q, k, v, bands, tiles, sinks, previous_out, previous_lse}, {*out, *lse, *counter},
                               {scale, soft_cap, sm_margin}),
             stream);
    });
}

template <ffi::ExecutionStage kStage> auto bind_forward() {
    return ffi::Ffi::Bind<kStage>()
        .template Ctx<Stream>()
        .template Arg<Argument>()          // q
        .template Arg<Argument>()          // k
        .template Arg<Argument>()          // v
        .template Arg<Argument>()          // bands
        .template Arg<Argument>()          // tiles
        .template Arg<Argument>()          // sinks
        .template OptionalArg<Argument>()  // previous_out
        .template OptionalArg<Argument>()  // previous_lse
        .template Ret<ffi::AnyBuffer>()    // out
        .template Ret<ffi::AnyBuffer>()    // lse
        .template Ret<ffi::AnyBuffer>()    // counter
        .template Attr<double>("scale")
        .template Attr<double>("soft_cap")
        .template Attr<int64_t>("sm_margin");
}

XLA_FFI_DEFINE_HANDLER(kInitializeForward, forward_stage<initialize_forward>,
                       bind_forward<ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER(kExecuteForward, forward_stage<execute_forward>, bind_forward<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

CudaHandlers attention_plan_cuda() {
    return {kInitializePlan, kExecutePlan};
}

CudaHandlers attention_forward_cuda() {
    return {kInitializeForward, kExecuteForward};
}

}  // namespace jaxmagi
