#include "csrc/attention/sm90/received_tiles.h"

#include "xla_ffi/attention_cuda_handler.h"
#include "xla_ffi/context_forward.h"

namespace jaxmagi {

sm90::ForwardParams Forward::to_params(const ContextAttributes& attributes, const Parts& parts,
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
    params.kv_row_heads = params.kv_heads;
    params.own = {parts.own_keys("k", operands.own.k, results.keys.all.k, part),
                  parts.own_keys("v", operands.own.v, results.keys.all.v, part), static_cast<int>(parts.tokens),
                  static_cast<int>(parts.key_heads * parts.count)};
    params.key_end = params.kv_len;
    const sm90::TileShape tile = find_tile(sm90::forward_tile, params.dim, params.v_dim);
    check_num_tiles("q", inputs.q, tile.rows);
    set_tile_schedule(params, inputs, params.batch, ceil_div(params.q_len, tile.rows));
    // With one mask, tiles that see no received keys are computed apart.
    params.subset = params.num_masks == 1 ? sm90::Tiles::kSeeReceived : sm90::Tiles::kAll;
    params.from_last_tile = params.num_masks == 1;
    check_forward(inputs, outputs, ffi::F32);
    check_buffer("sinks", operands.sinks, {2, parts.heads * parts.count}, ffi::F32);
    check_buffer("counters", results.counters, {2 * (attributes.num_parts + kMoreCounters)}, ffi::S32);
    params.out_f32 = outputs.out.element_type() == ffi::F32;
    params.sinks = data_of<const float>("sinks", inputs.sinks);
    params.out = data_of<void>("out", outputs.out, kTensorAlignment);
    params.lse = data_of<float>("lse", outputs.lse);
    return params;
}

cudaError_t Forward::preload(const sm90::ForwardParams& params) {
    cudaError_t error = sm90::preload_forward(params.dtype, params.dim, params.v_dim, params.soft_cap > 0);
    for (const auto preload : {sm90::preload_finish, sm90::preload_received_tiles})
        error = error == cudaSuccess ? preload() : error;
    return error;
}

void Forward::launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                     const Results& results, ContextFork& fork, ContextTransfers& transfers) {
    const int reserved = reserved_sms(attributes, parts);
    clear(results.counters, fork.program());
    fork.begin();
    ForwardCall call(attributes, parts, operands, results, fork, transfers);
    if (parts.are_within_host)
        launch_within_host(call, reserved);
    else
        launch_between_hosts(call, reserved);
}

ForwardCall::ForwardCall(const ContextAttributes& attributes, const Parts& parts, const Forward::Operands& operands,
                         const Forward::Results& results, ContextFork& fork, ContextTransfers& transfers)
    : attributes_(attributes),
      parts_(parts),
      operands_(operands),
      results_(results),
      fork_(fork),
      transfers_(transfers),
      counters_(data_of<int>("counters", results.counters)),
      flags_(reinterpret_cast<uint32_t*>(counters_ + attributes.num_parts + Forward::kMoreCounters)) {
    const int64_t in_blocks = sm90::own_keys_of_blocks(tile(to_params(0)));
    copied_ = transfers.find_copied_blocks(std::max<int64_t>(parts.tokens - in_blocks, 0), true, fork.copies());
}

sm90::ForwardParams ForwardCall::to_params(int64_t part) const {
    return Forward::to_params(attributes_, parts_, operands_, results_, part);
}

sm90::ForwardParams ForwardCall::to_own_tiles() const {
    sm90::ForwardParams params = to_params(0);
    params.heads = params.row_heads;
    params.kv_heads = params.kv_row_heads = static_cast<int>(parts_.key_heads * parts_.count);
    params.kv_len = params.key_end = static_cast<int>(parts_.tokens);
    params.k = params.own.k;
    params.v = params.own.v;
    params.own = {};
    params.subset = sm90::Tiles::kSeeOwn;
    params.from_last_tile = false;
    return params;
}

sm90::TileShape ForwardCall::tile(const sm90::ForwardParams& params) {
    return find_tile(sm90::forward_tile, params.dim, params.v_dim);
}

const uint8_t* ForwardCall::find_received_tiles(const sm90::ForwardParams& params, cudaStream_t stream) {
    const int num_tiles = ceil_div(params.q_len, tile(params).rows);
    auto* const sees_received = static_cast<uint8_t*>(transfers_.allocate(num_tiles));
    check_launch(sm90::find_received_tiles(params.tiles, num_tiles, sees_received, stream));
    return sees_received;
}

void ForwardCall::copy_next() {
    copies_.push_back(transfers_.copy_own(std::ssize(copies_), operands_.own, results_.keys.all, copied_));
}

void ForwardCall::bring_next() {
    const int64_t part = num_brought();
    if (part == std::ssize(copies_))
        copy_next();
    arrivals_.push_back(transfers_.bring(part, operands_.own, results_.keys, own_copied(part)));
}

void ForwardCall::keep_received() {
    for (int64_t part = 0; part < parts_.count and results_.kept.k.element_count() > 0; ++part)
        transfers_.keep(part, results_.keys.all, results_.kept);
}

void ForwardCall::help(const sm90::ForwardParams& params, int num_sms) const {
    check_launch(sm90::help_attention_forward(params, num_sms, fork_.helpers()));
}

CollectiveHandlers context_forward_cuda() {
    return context_handlers<Forward>();
}

}  // namespace jaxmagi
