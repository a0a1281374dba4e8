#include "csrc/attention/sm90/backward/backward.h"

#include "xla_ffi/attention_cuda_handler.h"
#include "xla_ffi/context_handler.h"

namespace jaxmagi {
namespace {

constexpr int64_t kMostWorkspaces = 2;  // as many parts as are under way at a time

struct Backward {
    static constexpr const char* kTarget = "jaxmagi_context_backward";
    static constexpr bool kHasPartsWithinHosts = false;

    struct Operands {
        ffi::AnyBuffer q;
        KeysValues own;
        ffi::AnyBuffer sorted, tiles, dout, lse, delta;
        ContextTables tables;
    };
    struct Results {
        ffi::AnyBuffer dq;
        ReturnArrays returns;
        CastArrays keys;
        ffi::AnyBuffer workspaces, drained;  // drained: flags of parts
    };

    static sm90::BackwardParams to_params(const ContextAttributes& attributes, const Parts& parts,
                                          const Operands& operands, const Results& results, int64_t part) {
        Views views;
        const struct { ffi::AnyBuffer q, k, v, sorted, tiles, dout, lse, delta; } inputs{
            parts.of_queries(views, operands.q, part), parts.of_keys(views, results.keys.all.k, part),
            parts.of_keys(views, results.keys.all.v, part), operands.sorted, operands.tiles,
            parts.of_queries(views, operands.dout, part), parts.of_queries(views, operands.lse, part),
            parts.of_queries(views, operands.delta, part)};
        const ffi::AnyBuffer dq = parts.of_queries(views, results.dq, part);
        const ffi::AnyBuffer dk = parts.of_keys(views, results.returns.gradients.k, part);
        const ffi::AnyBuffer dv = parts.of_keys(views, results.returns.gradients.v, part);
        sm90::BackwardParams params{};
        set_tensors(params, params.shape, inputs, KernelAttributes::of(attributes));
        params.row_heads = static_cast<int>(parts.heads * parts.count);
        const sm90::TileShape tile = find_tile(sm90::backward_tile, params.shape.dim, params.shape.v_dim);
        check_num_tiles("keys", inputs.k, tile.keys);
        check_num_tiles("q", inputs.q, 64);  // no kernel has shorter blocks of queries
        set_tile_schedule(params, inputs, params.shape.batch, ceil_div(params.shape.kv_len, tile.keys));
        check_buffer("dout", inputs.dout, out_shape(inputs.q, inputs.v), inputs.q.element_type());
        check_buffer("lse", inputs.lse, row_shape(inputs.q), ffi::F32);
        check_buffer("delta", inputs.delta, row_shape(inputs.q), ffi::F32);
        check_buffer("dq", dq, shape_of(inputs.q), inputs.q.element_type());
        check_buffer("dk", dk, shape_of(inputs.k), ffi::F32);
        check_buffer("dv", dv, shape_of(inputs.v), ffi::F32);
        params.key_gradients_f32 = true;
        params.dout = data_of<const void>("dout", inputs.dout, kTensorAlignment);
        params.lse = data_of<const float>("lse", inputs.lse);
        params.delta = data_of<const float>("delta", inputs.delta);
        params.dq = data_of<void>("dq", dq, kTensorAlignment);
        params.dk = data_of<void>("dk", dk, kTensorAlignment);
        params.dv = data_of<void>("dv", dv, kTensorAlignment);
        params.deterministic = attributes.deterministic;
        params.is_followed = part + 1 < parts.count;
        const int64_t bytes = sm90::backward_workspace_bytes(params.shape, params.num_masks, params.deterministic);
        const int64_t size = results.workspaces.size_bytes(), count = std::min(parts.count, kMostWorkspaces);
        check(count * bytes <= size, "workspaces must have ", count, " times ", bytes, " bytes, got ", size);
        params.workspace = data_of<char>("workspaces", results.workspaces, kTensorAlignment) + part % count * bytes;
        check_buffer("drained", results.drained, {attributes.num_parts}, ffi::S32);
        params.drained = reinterpret_cast<uint32_t*>(data_of<int>("drained", results.drained)) + part;
        return params;
    }

    static const KeysValues& keys(const Results& results) { return results.keys.all; }
    static size_t shared_bytes(const Results& results) {
        return std::max(size_bytes(results.keys.all), size_bytes(results.returns.gradients));
    }

    static cudaError_t preload(const sm90::BackwardParams& params) {
        return sm90::preload_backward(params.dtype, params.shape.dim, params.shape.v_dim, params.soft_cap > 0);
    }

    static void launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                       const Results& results, ContextFork& fork, ContextTransfers& transfers) {
        clear(results.drained, fork.program());
        fork.begin();
        std::vector arrivals{transfers.bring(0, operands.own, results.keys)};
        const int reserved = parts.count > 1 ? reserved_sms(attributes) : 0;
        const uint32_t* before = nullptr;
        for (int part = 0; part < parts.count; ++part) {
            const sm90::BackwardParams params = to_params(attributes, parts, operands, results, part);
            const cudaStream_t stream = fork.of_part(part);
            check_launch(sm90::prepare_attention_backward(params, stream));
            const cudaEvent_t prepared = fork.record(stream);
            fork.wait(stream, arrivals[part].all);
            if (before != nullptr)
                fork.wait_until_set(stream, before);
            before = params.drained;
            check_launch(sm90::run_attention_backward(params, params.num_sms - reserved, stream));
            if (part == 0)
                for (int64_t other = 1; other < parts.count; ++other)
                    arrivals.push_back(transfers.bring(other, operands.own, results.keys));
            if (reserved > 0) {  // when the casts, and the return of the part before, have ended
                fork.wait(fork.helpers(), prepared);
                fork.wait(fork.helpers(), fork.record(fork.transfers()));
                check_launch(sm90::run_attention_backward(params, reserved, fork.helpers()));
                fork.wait(stream, fork.record(fork.helpers()));
            }
            check_launch(sm90::finish_key_gradients(params, stream));
            fork.wait(fork.transfers(), fork.record(stream));
            check_launch(sm90::finish_query_gradients(params, stream));
            transfers.give_back(part, results.returns);
        }
    }
};

}  // namespace

CollectiveHandlers context_backward_cuda() {
    return context_handlers<Backward>();
}

}  // namespace jaxmagi
