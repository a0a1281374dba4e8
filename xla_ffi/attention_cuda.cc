#include "xla_ffi/attention_cuda.h"

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/attention/sm90/forward/forward.h"
#include "xla_ffi/attention_cuda_checks.h"

// Handlers come in two stages of one signature: Initialize checks the call and loads its kernels, Execute checks and
// launches, perhaps under stream capture.

namespace jaxmagi {
namespace {

// --- the plan ---

constexpr const char* kPlanTarget = "jaxmagi_attention_tile_schedule";

sm90::TileScheduleParams to_plan_params(const Argument& bands, const Argument& sorted, const Argument& tiles,
                                const Argument& workspace, int64_t q_len, int64_t kv_len, bool by_keys, int64_t dim,
                                int64_t v_dim) {
    check_type("bands", bands, ffi::S32);
    check_rank("bands", bands, 3);
    const Shape shape = shape_of(bands);
    check(shape[2] == 6, "bands must have shape [num_masks, capacity, 6], got " + to_string(shape));
    const sm90::TileShape tile = tile_of(by_keys ? sm90::backward_tile : sm90::forward_tile, dim, v_dim);
    const sm90::TileScheduleParams params{
        .bands = data_of<const int32_t>("bands", bands, 2 * sizeof(int32_t)),
        .num_masks = to_int("the number of num_masks", shape[0], 1),
        .capacity = to_int("the number of bands", shape[1]),
        .q_len = to_int("q_len", q_len),
        .kv_len = to_int("kv_len", kv_len),
        .by_keys = by_keys,
        .tile_rows = by_keys ? tile.keys : tile.rows,
        .block_keys = by_keys ? tile.rows : tile.keys,
        .sorted = data_of<sm90::ScheduledBand>("sorted", sorted),
        .tiles = data_of<sm90::ScheduledTile>("tiles", tiles),
        .workspace = data_of<uint64_t>("workspace", workspace, alignof(sm90::ScheduledTile))};
    const int length = by_keys ? params.kv_len : params.q_len;
    check_shape_and_type("sorted", sorted, {shape[0], shape[1], 8}, ffi::S32);
    check_shape_and_type("tiles", tiles, {shape[0], ceil_div(length, params.tile_rows), 4}, ffi::S32);
    const int64_t words = sm90::tile_schedule_workspace_words(params.num_masks, params.capacity, length, params.tile_rows);
    check_shape_and_type("workspace", workspace, {words, 2}, ffi::S32);
    return params;
}

void initialize_plan(const sm90::TileScheduleParams&, cudaStream_t) {
    check_cuda(sm90::preload_tile_schedule(), "loading the kernels");
}

void execute_plan(const sm90::TileScheduleParams& params, cudaStream_t stream) {
    check_cuda(sm90::make_tile_schedule(params, stream), "launching the kernels");
}

template <auto kRun>
ffi::Error plan_stage(cudaStream_t stream, Argument bands, Result sorted, Result tiles, Result workspace, int64_t q_len,
                      int64_t kv_len, bool by_keys, int64_t dim, int64_t v_dim) {
    return guarded(kPlanTarget, [&] {
        hopper_device();
        kRun(to_plan_params(bands, *sorted, *tiles, *workspace, q_len, kv_len, by_keys, dim, v_dim), stream);
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
        .template Attr<bool>("by_keys")
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
    const sm90::TileShape tile = tile_of(sm90::forward_tile, query[3], value[3]);
    check_plan(operands.bands, operands.tiles, query[0], ceil_div<int64_t>(query[1], tile.rows));
    check_shape_and_type("sinks", operands.sinks, {query[2]}, ffi::F32);
    check_results(operands, results);
    check_logits(numbers.scale, numbers.soft_cap);
    check_number_of_tiles("q", query, tile.rows);
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
            .num_masks = static_cast<int>(bands[0]),
            .capacity = to_int("the number of bands", bands[1]),
            .bands = data_of<const sm90::ScheduledBand>("bands", operands.bands),
            .tiles = data_of<const sm90::ScheduledTile>("tiles", operands.tiles),
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

CudaHandlers attention_tile_schedule_cuda() {
    return {kInitializePlan, kExecutePlan};
}

CudaHandlers attention_forward_cuda() {
    return {kInitializeForward, kExecuteForward};
}

}  // namespace jaxmagi
