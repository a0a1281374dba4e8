#include "csrc/attention/sm90/forward/forward.h"

#include "xla_ffi/attention_cuda_handler.h"
#include "xla_ffi/context_handler.h"

namespace jaxmagi {
namespace {

struct Forward {
    static constexpr const char* kTarget = "jaxmagi_context_forward";
    static constexpr bool kHasPartsWithinHosts = true;

    struct Operands {
        ffi::AnyBuffer q;
        KeysValues own;
        ffi::AnyBuffer sorted, tiles, sinks;  // sinks: [2, all heads], of which the second row has none
        ContextTables tables;
    };
    struct Results {
        ffi::AnyBuffer out, lse;
        CastArrays keys;
        ffi::AnyBuffer counters;  // of launches, and flags of parts
    };

    static sm90::ForwardParams to_params(const ContextAttributes& attributes, const Parts& parts,
                                         const Operands& operands, const Results& results, int64_t part) {
        Views views;
        const struct { ffi::AnyBuffer q, k, v, sorted, tiles, sinks; } inputs{
            parts.of_queries(views, operands.q, part), parts.of_keys(views, results.keys.all.k, part),
            parts.of_keys(views, results.keys.all.v, part), operands.sorted, operands.tiles,
            views.add(operands.sinks, part * parts.heads, {parts.heads})};
        const struct { ffi::AnyBuffer out, lse; } outputs{parts.of_queries(views, results.out, part),
                                                          parts.of_queries(views, results.lse, part)};
        sm90::ForwardParams params{};
        set_tensors(params, params, inputs, KernelAttributes::of(attributes));
        params.q_row_heads = params.row_heads = static_cast<int>(parts.heads * parts.count);
        params.key_end = params.kv_len;
        const sm90::TileShape tile = find_tile(sm90::forward_tile, params.dim, params.v_dim);
        check_num_tiles("q", inputs.q, tile.rows);
        set_tile_schedule(params, inputs, params.batch, ceil_div(params.q_len, tile.rows));
        check_forward(inputs, outputs, ffi::F32);
        check_buffer("sinks", operands.sinks, {2, parts.heads * parts.count}, ffi::F32);
        check_buffer("counters", results.counters, {2 * attributes.num_parts + 1}, ffi::S32);
        params.out_f32 = outputs.out.element_type() == ffi::F32;
        params.sinks = data_of<const float>("sinks", inputs.sinks);
        params.out = data_of<void>("out", outputs.out, kTensorAlignment);
        params.lse = data_of<float>("lse", outputs.lse);
        params.counter = data_of<int>("counters", results.counters) + part;
        params.counter_is_zero = true;
        params.drained = reinterpret_cast<uint32_t*>(params.counter + parts.count + 1);
        return params;
    }

    static const KeysValues& keys(const Results& results) { return results.keys.all; }
    static size_t shared_bytes(const Results& results) { return size_bytes(results.keys.all); }

    static cudaError_t preload(const sm90::ForwardParams& params) {
        const cudaError_t error = sm90::preload_forward(params.dtype, params.dim, params.v_dim, params.soft_cap > 0);
        return error == cudaSuccess ? sm90::preload_finish() : error;
    }

    static void launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                       const Results& results, ContextFork& fork, ContextTransfers& transfers) {
        clear(results.counters, fork.program());
        fork.begin();
        std::vector arrivals{transfers.bring(0, operands.own, results.keys)};
        const int reserved = reserved_sms(attributes);
        const uint32_t* before = nullptr;
        for (int part = 0; part < parts.count; ++part) {
            sm90::ForwardParams params = to_params(attributes, parts, operands, results, part);
            const bool is_last = part + 1 == parts.count;  // it begins when all keys are there
            const int helpers = is_last ? 0 : reserved;
            params.num_sms -= helpers;
            if (before != nullptr)
                fork.wait_until_set(fork.of_part(part), before);
            before = params.drained;
            const bool in_halves = part == 0 and transfers.crosses_hosts() and not params.out_f32;
            if (in_halves) {
                launch_in_halves(parts, params, operands.sinks, reserved, arrivals[part], fork, transfers);
            } else {
                fork.wait(fork.of_part(part), arrivals[part].all);
                check_launch(sm90::attention_forward(params, fork.of_part(part)));
            }
            if (part == 0) {
                for (int64_t other = 1; other < parts.count; ++other)
                    arrivals.push_back(transfers.bring(other, operands.own, results.keys));
                fork.wait(fork.helpers(), arrivals.back().all);
            }
            if (not in_halves)
                check_launch(sm90::help_attention_forward(params, helpers, fork.helpers()));
        }
    }

    // Launches the first part over the rank's own keys, and then over those that it receives, and merges the results.
    // That takes longer than all keys at once, but hides the transfer of its keys, which nothing else would.
    static void launch_in_halves(const Parts& parts, const sm90::ForwardParams& whole, const ffi::AnyBuffer& sinks,
                                 int reserved, const Arrival& arrival, ContextFork& fork, ContextTransfers& transfers) {
        const cudaStream_t stream = fork.of_part(0);
        const int64_t rows = parts.batch * parts.tokens, row_heads = rows * parts.heads;
        sm90::ForwardParams own = whole;
        own.out = transfers.allocate(row_heads * whole.v_dim * sizeof(float));
        own.lse = static_cast<float*>(transfers.allocate(row_heads * sizeof(float)));
        own.out_f32 = true;
        own.row_heads = whole.heads;
        own.sinks = data_of<const float>("sinks", sinks) + parts.heads * parts.count;
        own.counter += parts.count;
        own.drained = nullptr;
        own.key_end = static_cast<int>(parts.tokens);
        own.num_sms = hopper_device().num_sms - reserved;
        fork.wait(stream, arrival.own);
        check_launch(sm90::attention_forward(own, stream));
        sm90::ForwardParams received = own;
        received.counter = whole.counter;
        received.drained = whole.drained;
        received.key_begin = own.key_end;
        received.key_end = whole.key_end;
        received.previous_out = own.out;
        received.previous_lse = own.lse;
        received.num_sms = whole.num_sms;
        fork.wait(stream, arrival.all);
        check_launch(sm90::attention_forward(received, stream));
        check_launch(sm90::finish_attention_forward({.out = static_cast<const float*>(own.out),
                                                     .lse = own.lse,
                                                     .sinks = whole.sinks,
                                                     .to_out = whole.out,
                                                     .to_lse = whole.lse,
                                                     .dtype = whole.dtype,
                                                     .rows = rows,
                                                     .heads = whole.heads,
                                                     .row_heads = whole.row_heads,
                                                     .v_dim = whole.v_dim},
                                                    stream));
    }
};

}  // namespace

CollectiveHandlers context_forward_cuda() {
    return context_handlers<Forward>();
}

}  // namespace jaxmagi
