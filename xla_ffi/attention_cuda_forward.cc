#include "csrc/attention/sm90/forward/forward.h"

#include "xla_ffi/attention_cuda_handler.h"

namespace jaxmagi {
namespace {

struct Forward {
    static constexpr const char* kTarget = "jaxmagi_attention_forward";

    struct Attributes {
        double scale, soft_cap;
        int64_t sm_margin;
    };
    struct Operands { ffi::AnyBuffer q, k, v, sorted, tiles, sinks; };
    struct Previous { ffi::AnyBuffer out, lse; };  // optional operands: a partial result to merge with
    struct Results { ffi::AnyBuffer out, lse, counter; };

    static sm90::ForwardParams to_params(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                         const Attributes& attributes) {
        const size_t num_previous = args.size() > kNumBuffers<Operands> ? kNumBuffers<Previous> : 0;
        const auto operands = decode_buffers<Operands>(args, 0, num_previous);
        const auto results = decode_buffers<Results>(rets);
        sm90::ForwardParams params{};
        set_tensors(params, params, operands, attributes);
        const sm90::TileShape tile = find_tile(sm90::forward_tile, params.dim, params.v_dim);
        check_num_tiles("q", operands.q, tile.rows);
        set_tile_schedule(params, operands, params.batch, ceil_div(params.q_len, tile.rows));
        check_forward(operands, results, ffi::F32);
        check_buffer("counter", results.counter, {1}, ffi::S32);
        params.q_row_heads = params.row_heads = params.heads;
        params.kv_row_heads = params.kv_heads;
        params.key_end = params.kv_len;
        params.out_f32 = results.out.element_type() == ffi::F32;
        params.sinks = data_of<const float>("sinks", operands.sinks);
        params.out = data_of<void>("out", results.out, kTensorAlignment);
        params.lse = data_of<float>("lse", results.lse);
        params.counter = data_of<int>("counter", results.counter);
        if (num_previous > 0)
            set_previous(params, decode_buffers<Previous>(args, kNumBuffers<Operands>), results);
        return params;
    }

    static void set_previous(sm90::ForwardParams& params, const Previous& previous, const Results& results) {
        check_buffer("previous_out", previous.out, shape_of(results.out), results.out.element_type());
        check_buffer("previous_lse", previous.lse, shape_of(results.lse), ffi::F32);
        params.previous_out = data_of<const void>("previous_out", previous.out, kTensorAlignment);
        params.previous_lse = data_of<const float>("previous_lse", previous.lse);
    }

    static cudaError_t preload(const sm90::ForwardParams& params) {
        return sm90::preload_forward(params.dtype, params.dim, params.v_dim, params.soft_cap > 0);
    }
    static constexpr auto launch = sm90::attention_forward;
};

}  // namespace
}  // namespace jaxmagi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxmagi::Forward::Attributes, StructMember<double>("scale"),
                                      StructMember<double>("soft_cap"), StructMember<int64_t>("sm_margin"));

jaxmagi::CudaHandlers jaxmagi::attention_forward_cuda() {
    return cuda_handlers<Forward>();
}
