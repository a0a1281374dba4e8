#pragma once

#include <algorithm>

#include "csrc/attention/sm90/dispatch.cuh"
#include "csrc/attention/sm90/forward/kernel.cuh"
#include "csrc/attention/sm90/forward/kernels.h"
#include "csrc/common/sm90/tensor_map.h"

// The host side of a forward kernel.

namespace jaxmagi::sm90 {

inline ForwardArguments make_arguments(const ForwardParams& params, int tile_rows, bool helps) {
    const bool capped = params.soft_cap > 0;
    const ForwardSchedule schedule = make_schedule(params, tile_rows);
    return {.schedule = schedule,
            .subset = params.subset,
            .tile_step = params.from_last_tile ? -1 : 1,
            .bands = params.bands,
            .tiles = params.tiles + (params.from_last_tile ? schedule.num_tiles - 1 : 0),
            .counter = params.counter,
            .drained = params.drained,
            .first_items = std::min(params.num_sms, schedule.num_items),
            .helps = helps,
            .capacity = params.capacity,
            .q_len = params.q_len,
            .kv_len = params.kv_len,
            .row_heads = params.row_heads,
            .kv_heads = params.kv_heads,
            .v_dim = params.v_dim,
            .key_begin = params.key_begin,
            .key_end = params.key_end,
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
    return cudaFuncSetAttribute(forward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                ForwardMemory<Config>::kBytes);
}

template <typename Config>
cudaError_t encode_maps(const ForwardParams& params, int pack, ForwardTensorMaps* maps) {
    const CUtensorMapDataType type = tensor_map_type(params.dtype);
    const HeadsTensor q{params.q, type, params.batch, params.q_len, params.heads, params.q_row_heads, params.dim};
    const int kv_heads = params.kv_heads, kv_row_heads = params.kv_row_heads;
    const HeadsTensor k{params.k, type, params.batch, params.kv_len, kv_heads, kv_row_heads, params.dim};
    const HeadsTensor v{params.v, type, params.batch, params.kv_len, kv_heads, kv_row_heads, params.v_dim};
    const HeadsTensor out{params.out, type, params.batch, params.q_len, params.heads, params.row_heads, params.v_dim};
    const struct {
        const HeadsTensor& tensor;
        int heads, positions;
        CUtensorMap* map;
    } boxes[] = {{q, pack, Config::kRows / pack, &maps->q},
                 {k, 1, Config::kKeys, &maps->k},
                 {v, 1, Config::kKeys, &maps->v},
                 {k, 1, kPartKeys, &maps->k_part},
                 {v, 1, kPartKeys, &maps->v_part}};
    for (const auto& [tensor, heads, positions, map] : boxes)
        if (const cudaError_t error = encode_panel_map(tensor, heads, positions, map); error != cudaSuccess)
            return error;
    if (Config::kStagesOut and not params.out_f32)
        return encode_panel_map(out, pack, 64 / pack, &maps->out);
    return cudaSuccess;
}

// num_helpers: 0 for the call itself; otherwise CTAs that help it.
template <typename Config>
cudaError_t launch_forward(const ForwardParams& params, int num_helpers, cudaStream_t stream) {
    const bool helps = num_helpers > 0;
    const ForwardArguments args = make_arguments(params, Config::kRows, helps);
    const bool has_claims = args.first_items < args.schedule.num_items;
    if (helps and not has_claims)
        return cudaSuccess;
    ForwardTensorMaps maps{};
    cudaError_t error = encode_maps<Config>(params, args.schedule.pack, &maps);
    if (error == cudaSuccess and has_claims and not helps and not params.counter_is_zero)
        error = cudaMemsetAsync(params.counter, 0, sizeof(int), stream);
    if (error != cudaSuccess)
        return error;
    const int grid = helps ? num_helpers : args.first_items;
    forward_kernel<Config><<<grid, Config::kThreads, ForwardMemory<Config>::kBytes, stream>>>(maps, args);
    return cudaGetLastError();
}

// kKeys, kCappedKeys: keys of a block without and with soft cap, which takes registers.
template <int kDim, int kVDim, int kConsumers, int kKeys, int kCappedKeys> struct ForwardInstance {
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
