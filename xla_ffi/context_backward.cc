#include "xla_ffi/attention_cuda_handler.h"
#include "xla_ffi/context_backward.h"

namespace jaxmagi {

sm90::BackwardParams Backward::to_params(const ContextAttributes& attributes, const Parts& parts,
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
    params.own = {parts.own_keys("k", operands.own.k, results.keys.all.k, part),
                  parts.own_keys("v", operands.own.v, results.keys.all.v, part), static_cast<int>(parts.tokens),
                  static_cast<int>(parts.key_heads * parts.count)};
    params.is_part = parts.count > 1;
    const sm90::TileShape tile = find_tile(sm90::backward_tile, params.shape.dim, params.shape.v_dim);
    check_num_tiles("keys", inputs.k, tile.keys);
    check_num_tiles("q", inputs.q, 64);  // no kernel has shorter blocks of queries
    params.shape.key_tiles = ceil_div(params.shape.kv_len, tile.keys);
    set_tile_schedule(params, inputs, params.shape.batch, params.shape.key_tiles);
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
    const int64_t bytes = sm90::backward_workspace_bytes(params.shape, params.num_masks, params.deterministic);
    const int64_t size = results.workspaces.size_bytes();
    const int64_t count = std::min(parts.count, int64_t{to_int("num_workspaces", attributes.num_workspaces, 1)});
    check(count * bytes <= size, "workspaces must have ", count, " times ", bytes, " bytes, got ", size);
    params.workspace = data_of<char>("workspaces", results.workspaces, kTensorAlignment) + part % count * bytes;
    check_buffer("flags", results.flags, {attributes.num_parts * kFlags}, ffi::S32);
    params.drained = reinterpret_cast<uint32_t*>(data_of<int>("flags", results.flags)) + part * kFlags;
    return params;
}

void Backward::launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                      const Results& results, ContextFork& fork, ContextTransfers& transfers) {
    const int reserved = reserved_sms(attributes, parts);
    BackwardCall call(attributes, parts, operands, results, fork, transfers);
    clear(results.flags, fork.program());
    fork.begin();
    call.bring_next();
    if (parts.are_within_host and parts.count == 1)
        launch_within_host(call, reserved);
    else
        launch_by_part(call, reserved);
}

BackwardCall::BackwardCall(const ContextAttributes& attributes, const Parts& parts, const Backward::Operands& operands,
                           const Backward::Results& results, ContextFork& fork, ContextTransfers& transfers)
    : operands_(operands),
      results_(results),
      fork_(fork),
      transfers_(transfers),
      num_workspaces_(attributes.num_workspaces) {
    for (int64_t part = 0; part < parts.count; ++part)
        parts_.push_back({Backward::to_params(attributes, parts, operands, results, part)});
    // Own keys of a tile that has received ones too are read in front of these.
    const int64_t in_own_tiles = parts.tokens / tile_keys() * tile_keys();
    copied_ = transfers.find_copied_blocks(in_own_tiles, not has_kept_keys(), fork.program());
    sent_ = transfers.find_sent_blocks(num_own_tiles(params(0)), tile_keys(), fork.program());
    for (int64_t part = 0; part < parts.count; ++part)
        parts_[part].params.final = final_gradients(parts, part);
}

void BackwardCall::bring_next() {
    const int64_t part = num_brought();
    const cudaEvent_t own_copied = transfers_.copy_own(part, operands_.own, results_.keys.all, copied_);
    arrivals_.push_back(has_kept_keys()
                            ? transfers_.put_back(part, operands_.kept, results_.keys.all, own_copied)
                            : transfers_.bring(part, operands_.own, results_.keys, own_copied));
}

void BackwardCall::prepare(int64_t number, cudaStream_t stream) {
    Part& part = parts_[number];
    if (part.prepared == nullptr) {
        if (number >= num_workspaces_) {
            const cudaEvent_t before = parts_[number - num_workspaces_].finished;
            check(before != nullptr, "part ", number, " cannot have a workspace that is still in use");
            fork_.wait(stream, before);
        }
        check_launch(sm90::prepare_attention_backward(part.params, stream));
        part.prepared = fork_.record(stream);
    }
    fork_.wait(stream, part.prepared);
}

void BackwardCall::finish(int64_t number, sm90::KeyTiles tiles) {
    Part& part = parts_[number];
    const cudaStream_t helpers = fork_.helpers();
    check_launch(sm90::finish_key_gradients(part.params, tiles, helpers));
    fork_.wait(fork_.transfers(), fork_.record(helpers));
    if (tiles == sm90::KeyTiles::kOthers)
        transfers_.give_back(number, results_.returns);
    if (++part.num_finished < 2)
        return;
    transfers_.add_own(number, results_.returns, sent_);
    check_launch(sm90::finish_query_gradients(part.params, helpers));
    part.finished = fork_.record(helpers);
}

int BackwardCall::tile_keys() const {
    const sm90::BackwardShape& shape = params(0).shape;
    return find_tile(sm90::backward_tile, shape.dim, shape.v_dim).keys;
}

// Returns where gradients of own tiles go that are not sent.
sm90::FinalGradients BackwardCall::final_gradients(const Parts& parts, int64_t part) const {
    const KeysValues& result = results_.returns.result;
    const auto place = [&](const char* name, const ffi::AnyBuffer& gradients) {
        return data_of<uint16_t>(name, gradients, 16) + part * parts.key_heads * gradients.dimensions()[3];
    };
    return {place("dk", result.k), place("dv", result.v), sent_.is_sent};
}

CollectiveHandlers context_backward_cuda() {
    return context_handlers<Backward>();
}

}  // namespace jaxmagi
