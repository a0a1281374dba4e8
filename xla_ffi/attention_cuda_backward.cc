#include "csrc/attention/sm90/backward/backward.h"

#include "xla_ffi/attention_cuda_handler.h"

namespace jaxmagi {
namespace {

struct Backward {
    static constexpr const char* kTarget = "jaxmagi_attention_backward";

    struct Attributes {
        double scale, soft_cap;
        bool deterministic;
        int64_t sm_margin;
    };
    struct Operands { ffi::AnyBuffer q, k, v, sorted, tiles, dout, lse, delta; };
    struct Results { ffi::AnyBuffer dq, dk, dv, workspace; };

    static sm90::BackwardParams to_params(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                          const Attributes& attributes) {
        const auto operands = decode_buffers<Operands>(args);
        const auto results = decode_buffers<Results>(rets);
        sm90::BackwardParams params{};
        set_tensors(params, params.shape, operands, attributes);
        const sm90::TileShape tile = find_tile(sm90::backward_tile, params.shape.dim, params.shape.v_dim);
        check_num_tiles("k", operands.k, tile.keys);
        check_num_tiles("q", operands.q, 64);  // no kernel has shorter blocks of queries
        params.shape.key_tiles =
            num_tiles_of(operands.tiles, params.shape.kv_len, tile.keys, not attributes.deterministic);
        set_tile_schedule(params, operands, params.shape.batch, params.shape.key_tiles);
        check_backward(operands, results, ffi::F32);
        params.row_heads = params.shape.heads;
        params.dq_f32 = params.key_gradients_f32 = results.dq.element_type() == ffi::F32;
        params.dout = data_of<const void>("dout", operands.dout, kTensorAlignment);
        params.lse = data_of<const float>("lse", operands.lse);
        params.delta = data_of<const float>("delta", operands.delta);
        params.dq = data_of<void>("dq", results.dq, kTensorAlignment);
        params.dk = data_of<void>("dk", results.dk, kTensorAlignment);
        params.dv = data_of<void>("dv", results.dv, kTensorAlignment);
        params.deterministic = attributes.deterministic;
        const int64_t bytes = sm90::backward_workspace_bytes(params.shape, params.num_masks, params.deterministic);
        check_buffer("workspace", results.workspace, {bytes / 16, 4}, ffi::S32);
        params.workspace = data_of<void>("workspace", results.workspace, kTensorAlignment);
        return params;
    }

    static cudaError_t preload(const sm90::BackwardParams& params) {
        return sm90::preload_backward(params.dtype, params.shape.dim, params.shape.v_dim, params.soft_cap > 0);
    }
    static constexpr auto launch = sm90::attention_backward;
};

}  // namespace
}  // namespace jaxmagi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxmagi::Backward::Attributes, StructMember<double>("scale"),
                                      StructMember<double>("soft_cap"), StructMember<bool>("deterministic"),
                                      StructMember<int64_t>("sm_margin"));

jaxmagi::CudaHandlers jaxmagi::attention_backward_cuda() {
    return cuda_handlers<Backward>();
}
