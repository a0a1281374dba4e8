#include "csrc/attention/sm90/backward/backward.h"

#include "xla_ffi/attention_cuda.h"
#include "xla_ffi/attention_cuda_checks.h"

// The handler of the backward pass, in two stages: see attention_cuda.cc.

namespace jaxmagi {
namespace {

constexpr const char* kBackwardTarget = "jaxmagi_attention_backward";

struct BackwardOperands {
    const Argument &q, &k, &v, &bands, &tiles, &dout, &lse, &delta;
};

struct BackwardResults {
    const Argument &dq, &dk, &dv, &workspace;
};

struct BackwardNumbers {
    double scale, soft_cap;
    bool deterministic;
    int64_t sm_margin;
};

void check_rows(const BackwardOperands& operands, const Shape& query, const Shape& value) {
    const Shape rows{query[0], query[1], query[2]};
    check_shape_and_type("dout", operands.dout, {query[0], query[1], query[2], value[3]}, operands.q.element_type());
    check_shape_and_type("lse", operands.lse, rows, ffi::F32);
    check_shape_and_type("delta", operands.delta, rows, ffi::F32);
}

void check_gradients(const BackwardOperands& operands, const BackwardResults& results) {
    const ffi::DataType type = results.dq.element_type();
    if (type != ffi::F32)
        check_type("dq", results.dq, operands.q.element_type());
    check_shape("dq", results.dq, shape_of(operands.q));
    check_shape_and_type("dk", results.dk, shape_of(operands.k), type);
    check_shape_and_type("dv", results.dv, shape_of(operands.v), type);
}

sm90::BackwardShape to_backward_shape(const Shape& query, const Shape& value) {
    return {.batch = to_int("the batch", query[0], 1),
            .q_len = to_int("the length of q", query[1], 1),
            .kv_len = to_int("the length of k", value[1], 1),
            .heads = to_int("the heads of q", query[2], 1),
            .kv_heads = to_int("the heads of k", value[2], 1),
            .dim = static_cast<int>(query[3]),
            .v_dim = static_cast<int>(value[3])};
}

sm90::BackwardParams to_backward_params(const BackwardOperands& operands, const BackwardResults& results,
                                        const BackwardNumbers& numbers) {
    const CudaDevice& device = hopper_device();
    const sm90::DType dtype = dtype_of(operands.q);
    check_tensors(operands.q, operands.k, operands.v);
    const Shape query = shape_of(operands.q), value = shape_of(operands.v);
    const sm90::TileShape tile = tile_of(sm90::backward_tile, query[3], value[3]);
    check_plan(operands.bands, operands.tiles, query[0], ceil_div<int64_t>(value[1], tile.keys));
    check_rows(operands, query, value);
    check_gradients(operands, results);
    check_logits(numbers.scale, numbers.soft_cap);
    check_number_of_tiles("k", value, tile.keys);
    check_number_of_tiles("q", query, 64);  // row blocks, none of which is shorter
    const sm90::BackwardShape shape = to_backward_shape(query, value);
    const Shape bands = shape_of(operands.bands);
    const int num_masks = static_cast<int>(bands[0]);
    const int64_t bytes = sm90::backward_workspace_bytes(shape, num_masks, numbers.deterministic);
    check_shape_and_type("workspace", results.workspace, {bytes / 16, 4}, ffi::S32);
    return {.dtype = dtype,
            .gradients_f32 = results.dq.element_type() == ffi::F32,
            .shape = shape,
            .q = data_of<const void>("q", operands.q, kTensorAlignment),
            .k = data_of<const void>("k", operands.k, kTensorAlignment),
            .v = data_of<const void>("v", operands.v, kTensorAlignment),
            .num_masks = num_masks,
            .capacity = to_int("the number of bands", bands[1]),
            .bands = data_of<const sm90::ScheduledBand>("bands", operands.bands),
            .tiles = data_of<const sm90::ScheduledTile>("tiles", operands.tiles),
            .dout = data_of<const void>("dout", operands.dout, kTensorAlignment),
            .lse = data_of<const float>("lse", operands.lse),
            .delta = data_of<const float>("delta", operands.delta),
            .dq = data_of<void>("dq", results.dq, kTensorAlignment),
            .dk = data_of<void>("dk", results.dk, kTensorAlignment),
            .dv = data_of<void>("dv", results.dv, kTensorAlignment),
            .workspace = data_of<void>("workspace", results.workspace, kTensorAlignment),
            .scale = static_cast<float>(numbers.scale),
            .soft_cap = static_cast<float>(numbers.soft_cap),
            .deterministic = numbers.deterministic,
            .num_sms = num_ctas(device, numbers.sm_margin)};
}

void initialize_backward(const sm90::BackwardParams& params, cudaStream_t) {
    check_cuda(sm90::preload_backward(params.dtype, params.shape.dim, params.shape.v_dim, params.soft_cap > 0),
               "loading the kernels");
}

void execute_backward(const sm90::BackwardParams& params, cudaStream_t stream) {
    check_cuda(sm90::attention_backward(params, stream), "launching the kernels");
}

template <auto kRun>
ffi::Error backward_stage(cudaStream_t stream, Argument q, Argument k, Argument v, Argument bands, Argument tiles,
                          Argument dout, Argument lse, Argument delta, Result dq, Result dk, Result dv,
                          Result workspace, double scale, double soft_cap, bool deterministic, int64_t sm_margin) {
    return guarded(kBackwardTarget, [&] {
        kRun(to_backward_params({q, k, v, bands, tiles, dout, lse, delta}, {*dq, *dk, *dv, *workspace},
                                {scale, soft_cap, deterministic, sm_margin}),
             stream);
    });
}

template <ffi::ExecutionStage kStage> auto bind_backward() {
    return ffi::Ffi::Bind<kStage>()
        .template Ctx<Stream>()
        .template Arg<Argument>()        // q
        .template Arg<Argument>()        // k
        .template Arg<Argument>()        // v
        .template Arg<Argument>()        // bands
        .template Arg<Argument>()        // tiles
        .template Arg<Argument>()        // dout
        .template Arg<Argument>()        // lse
        .template Arg<Argument>()        // delta
        .template Ret<ffi::AnyBuffer>()  // dq
        .template Ret<ffi::AnyBuffer>()  // dk
        .template Ret<ffi::AnyBuffer>()  // dv
        .template Ret<ffi::AnyBuffer>()  // workspace
        .template Attr<double>("scale")
        .template Attr<double>("soft_cap")
        .template Attr<bool>("deterministic")
        .template Attr<int64_t>("sm_margin");
}

XLA_FFI_DEFINE_HANDLER(kInitializeBackward, backward_stage<initialize_backward>,
                       bind_backward<ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER(kExecuteBackward, backward_stage<execute_backward>,
                       bind_backward<ffi::ExecutionStage::kExecute>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

CudaHandlers attention_backward_cuda() {
    return {kInitializeBackward, kExecuteBackward};
}

}  // namespace jaxmagi
