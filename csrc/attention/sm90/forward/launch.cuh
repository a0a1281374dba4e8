#pragma once

#include <algorithm>

#include "csrc/attention/sm90/dispatch.cuh"
#include "csrc/attention/sm90/forward/kernel.cuh"
#include "csrc/attention/sm90/forward/kernels.h"
#include "csrc/common/sm90/tensor_map.h"

// The host side of a forward kernel.

namespace jaxmagi::sm90 {

inline ForwardWork make_work(const ForwardParams& params, const TileShape& tile) {
    const ForwardSchedule schedule = make_schedule(params, tile.rows);
    const int first_items = params.claims_all ? 0 : std::min(params.num_sms, schedule.num_items);
    return {.schedule = schedule,
            .subset = params.subset,
            .tiles = params.tiles + (params.from_last_tile ? schedule.num_tiles - 1 : 0),
            .tile_step = params.from_last_tile ? -1 : 1,
            .claimed_items = schedule.num_items - first_items,
            .counter = params.counter,
            .part = params.next == nullptr ? 0 : -1,
            .first_head = 0,
            .keys = {params.own.length > 0 ? params.own.length - own_keys_of_blocks(tile) : kUnbounded, 0, 0},
            .kv_heads = params.kv_heads,
            .asks_for_parts = false};
}

// Returns the call with the parts, which is the call itself unless it goes on with another one.
inline const ForwardParams& parts_of(const ForwardParams& params) {
    return params.next == nullptr ? params : *params.next;
}

inline ForwardArguments make_arguments(const ForwardParams& params, const TileShape& tile, bool helps) {
    const bool capped = params.soft_cap > 0;
    const ForwardParams& parts = parts_of(params);
    return {.first = make_work(params, tile),
            .parts = make_work(parts, tile),
            .num_parts = parts.num_parts,
            .batch = params.batch,
            .num_arrived = parts.num_arrived,
            .bands = params.bands,
            .drained = helps ? nullptr : params.drained,  // helpers may come before the call's own CTAs
            .num_ctas = params.num_sms,
            .claims_first = helps or params.claims_all,
            .capacity = params.capacity,
            .q_len = params.q_len,
            .kv_len = std::max(params.kv_len, parts.kv_len),
            .row_heads = params.row_heads,
            .v_dim = params.v_dim,
            .key_begin = params.key_begin,
            .key_end = std::max(params.key_end, parts.key_end),
            .sinks = params.sinks,
            .previous_out = params.previous_out,
            .previous_lse = params.previous_lse,
            .out = params.out,
            .lse = params.lse,
            .out_f32 = params.out_f32,
            .logit_scale = capped ? params.scale / params.soft_cap : params.scale * kLog2E,
            .cap_log2 = params.soft_cap * kLog2E};
}

template <typename Config> cudaError_t load_forward() {
    using Memory = ForwardMemory<Config>;
    return load_kernel(forward_kernel<Config>, Memory::kBase, Memory::kBytes);
}

// The keys and values of a call: own ones of all its parts, and those in the arrays of parts.
struct KeyTensors {
    HeadsTensor k, v;

    static KeyTensors own(const ForwardParams& params) {
        const CUtensorMapDataType type = tensor_map_type(params.dtype);
        const int heads = params.num_parts * params.kv_heads;
        const auto& [k, v, length, row_heads] = params.own;
        return {{k, type, params.batch, length, heads, row_heads, params.dim},
                {v, type, params.batch, length, heads, row_heads, params.v_dim}};
    }
    static KeyTensors of_parts(const ForwardParams& params) {
        const CUtensorMapDataType type = tensor_map_type(params.dtype);
        const int batch = params.num_parts * params.batch, heads = params.kv_heads, row_heads = params.kv_row_heads;
        return {{params.k, type, batch, params.kv_len, heads, row_heads, params.dim},
                {params.v, type, batch, params.kv_len, heads, row_heads, params.v_dim}};
    }
};

// Encodes the maps of keys and values that have the index.
template <typename Config>
cudaError_t encode_key_maps(const KeyTensors& tensors, int index, ForwardTensorMaps* maps) {
    const auto& [k, v] = tensors;
    const struct {
        const HeadsTensor& tensor;
        int keys;
        CUtensorMap* map;
    } boxes[] = {{k, Config::kKeys, &maps->k[index]},
                 {v, Config::kKeys, &maps->v[index]},
                 {k, kPartKeys, &maps->k_part[index]},
                 {v, kPartKeys, &maps->v_part[index]}};
    for (const auto& [tensor, keys, map] : boxes)
        if (const cudaError_t error = encode_panel_map(tensor, 1, keys, map); error != cudaSuccess)
            return error;
    return cudaSuccess;
}

template <typename Config>
cudaError_t encode_maps(const ForwardParams& params, int pack, ForwardTensorMaps* maps) {
    const CUtensorMapDataType type = tensor_map_type(params.dtype);
    const int heads = params.num_parts * params.heads;
    const HeadsTensor q{params.q, type, params.batch, params.q_len, heads, params.q_row_heads, params.dim};
    const HeadsTensor out{params.out, type, params.batch, params.q_len, heads, params.row_heads, params.v_dim};
    cudaError_t error = encode_panel_map(q, pack, Config::kRows / pack, &maps->q);
    const ForwardParams& parts = parts_of(params);
    const bool has_own = parts.own.length > 0;
    if (error == cudaSuccess)
        error = encode_key_maps<Config>(has_own ? KeyTensors::own(parts) : KeyTensors::of_parts(parts), 0, maps);
    if (error == cudaSuccess and has_own)
        error = encode_key_maps<Config>(KeyTensors::of_parts(parts), 1, maps);
    if (error == cudaSuccess and Config::kStagesOut and not params.out_f32)
        error = encode_panel_map(out, pack, 64 / pack, &maps->out);
    return error;
}

// Returns whether the keys of a call are all own keys of parts, whose tensor maps it has.
inline bool has_own_keys_of(const ForwardParams& params, const OwnKeys& own) {
    return own.length > 0 and params.own.length == 0 and params.k == own.k and params.v == own.v and
           params.kv_len == own.length and params.kv_row_heads == own.row_heads;
}

inline bool has_valid_parts(const ForwardParams& params) {
    if (params.next != nullptr and
        (params.num_parts > 1 or not params.next->claims_all or not has_own_keys_of(params, params.next->own)))
        return false;
    return parts_of(params).num_parts <= kMostForwardParts and
           (params.num_parts == 1 or (params.claims_all and params.own.length > 0));
}

// num_helpers: 0 for the call itself; otherwise CTAs that help it.
template <typename Config>
cudaError_t launch_forward(const ForwardParams& params, int num_helpers, cudaStream_t stream) {
    const bool helps = num_helpers > 0;
    if (not has_valid_parts(params))
        return cudaErrorInvalidValue;
    const ForwardArguments args = make_arguments(params, {Config::kRows, Config::kKeys}, helps);
    const bool has_claims = args.first.claimed_items > 0;
    if (helps and not has_claims and params.next == nullptr)
        return cudaSuccess;
    ForwardTensorMaps maps{};
    cudaError_t error = encode_maps<Config>(params, args.first.schedule.pack, &maps);
    if (error == cudaSuccess and has_claims and not helps and not params.counter_is_zero)
        error = cudaMemsetAsync(params.counter, 0, params.num_parts * sizeof(int), stream);
    if (error != cudaSuccess)
        return error;
    const int most = params.next == nullptr ? params.num_parts * args.first.schedule.num_items : params.num_sms;
    const int grid = helps ? num_helpers : std::min(params.num_sms, most);
    forward_kernel<Config><<<grid, Config::kThreads, ForwardMemory<Config>::kBytes, stream>>>(maps, args);
    return cudaGetLastError();
}

// kKeys, kCappedKeys: keys of a block without and with soft cap, which takes registers.
template <int kDim, int kVDim, int kConsumers, int kKeys, int kCappedKeys> struct ForwardInstance {
    static_assert(kCappedKeys <= kKeys);  // own keys are copied for blocks of kKeys

    template <typename Element, bool kSoftCap>
    using Config = ForwardConfig<Element, kDim, kVDim, kConsumers, kSoftCap ? kCappedKeys : kKeys, kSoftCap>;

    static cudaError_t load(DType dtype, bool soft_cap) {
        return with_config<Config>(dtype, soft_cap, [](auto config) { return load_forward<decltype(config)>(); });
    }
    static cudaError_t launch(const ForwardParams& params, int num_helpers, cudaStream_t stream) {
        return with_config<Config>(params.dtype, params.soft_cap > 0, [&](auto config) {
            return launch_forward<decltype(config)>(params, num_helpers, stream);
        });
    }
    static constexpr ForwardKernel kKernel{kDim, kVDim, {64 * kConsumers, kKeys}, load, launch};
};

}  // namespace jaxmagi::sm90
