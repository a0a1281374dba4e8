#pragma once

#include <algorithm>

#include "csrc/attention/sm90/backward/kernel.cuh"
#include "csrc/attention/sm90/backward/kernels.h"
#include "csrc/attention/sm90/dispatch.cuh"
#include "csrc/common/sm90/tensor_map.h"

// The host side of a backward kernel.

namespace jaxmagi::sm90 {

inline BackwardSchedules make_schedules(const BackwardParams& params, const BackwardStage& stage, int kernel_dim,
                                        TileShape tile) {
    // Tiles of whole groups are short, or many are about as long and their heads take turns often, so that neighbours
    // seldom wait long, as if they were even.
    const int few_heads = heads_of_item(params.shape, kernel_dim), group = params.shape.heads / params.shape.kv_heads;
    const int chunk = kChunkQueries / tile.rows;
    return {{make_schedule(params, stage, tile, few_heads, false, chunk),
             make_schedule(params, stage, tile, few_heads, true, chunk),
             make_schedule(params, stage, tile, group, true, kWholeGroupChunkBlocks)}};
}

inline BackwardArguments make_arguments(const BackwardParams& params, const BackwardLaunch& launch,
                                        const BackwardWorkspace& workspace, int kernel_dim, TileShape tile) {
    const BackwardShape& shape = params.shape;
    const bool capped = params.soft_cap > 0;
    BackwardArguments args{
            .stages = {},
            .num_stages = launch.num_stages,
            .whole_groups = make_whole_groups(params, kernel_dim),
            .workspace = workspace,
            .bands = params.bands,
            .tiles = params.tiles,
            .capacity = params.capacity,
            .q_len = shape.q_len,
            .heads = shape.heads,
            .kv_heads = shape.kv_heads,
            .dim = shape.dim,
            .v_dim = shape.v_dim,
            .gradients = make_key_gradients(params, tile),
            .own_end = range_of(params, tile, KeyTiles::kOwn).end * tile.keys,
            .arrived = launch.arrived,
            .counters = workspace.counters + launch.first_counter,
            .drained = params.drained == nullptr ? nullptr : params.drained + launch.first_counter,
            .deterministic = params.deterministic,
            .logit_scale = capped ? params.scale / params.soft_cap : params.scale * kLog2E,
            .cap_log2 = params.soft_cap * kLog2E,
            .scale = params.scale};
    for (int stage = 0; stage < launch.num_stages; ++stage)
        args.stages[stage] = make_schedules(params, launch.stages[stage], kernel_dim, tile);
    return args;
}

template <typename Config> cudaError_t load_backward() {
    using Memory = BackwardMemory<Config>;
    return load_kernel(backward_kernel<Config>, Memory::kBase, Memory::kBytes);
}

template <typename Config> cudaError_t encode_maps(const BackwardParams& params, BackwardTensorMaps* maps) {
    const CUtensorMapDataType type = tensor_map_type(params.dtype);
    const auto [batch, q_len, kv_len, heads, kv_heads, dim, v_dim, key_tiles] = params.shape;
    const OwnKeys all_keys{params.k, params.v, kv_len, kv_heads};
    const OwnKeys& own = params.own.length > 0 ? params.own : all_keys;
    const struct {
        HeadsTensor tensor;
        int rows;
        CUtensorMap* map;
    } all[] = {{{params.q, type, batch, q_len, heads, params.row_heads, dim}, Config::kRows, &maps->q},
               {{params.dout, type, batch, q_len, heads, params.row_heads, v_dim}, Config::kRows, &maps->dout},
               {{params.k, type, batch, kv_len, kv_heads, kv_heads, dim}, Config::kKeys, &maps->k},
               {{params.v, type, batch, kv_len, kv_heads, kv_heads, v_dim}, Config::kKeys, &maps->v},
               {{own.k, type, batch, own.length, kv_heads, own.row_heads, dim}, Config::kKeys, &maps->own_k},
               {{own.v, type, batch, own.length, kv_heads, own.row_heads, v_dim}, Config::kKeys, &maps->own_v}};
    for (const auto& [tensor, rows, map] : all)
        if (const cudaError_t error = encode_panel_map(tensor, 1, rows, map); error != cudaSuccess)
            return error;
    return cudaSuccess;
}

template <typename Config>
cudaError_t launch_backward(const BackwardParams& params, const BackwardLaunch& launch,
                            const BackwardWorkspace& workspace, cudaStream_t stream) {
    BackwardTensorMaps maps;
    if (const cudaError_t error = encode_maps<Config>(params, &maps); error != cudaSuccess)
        return error;
    const TileShape tile{Config::kRows, Config::kKeys};
    const BackwardArguments args = make_arguments(params, launch, workspace, Config::kDim, tile);
    int claims = 0;
    for (int stage = 0; stage < args.num_stages; ++stage)
        claims += args.stages[stage].variants[kHeadSets].num_claims;
    const int grid = std::clamp(claims, 1, launch.num_sms);  // one CTA sets the flag if nothing is to be done
    backward_kernel<Config><<<grid, Config::kThreads, BackwardMemory<Config>::kBytes, stream>>>(maps, args);
    return cudaGetLastError();
}

// kRows, kKeys: queries of a block, keys of a tile. kQStages, kDoutStages: of shared memory.
template <int kDim, int kVDim, int kRows, int kKeys, int kConsumers, int kQStages, int kDoutStages>
struct BackwardInstance {
    template <typename Element, bool kSoftCap>
    using Config = BackwardConfig<Element, kDim, kVDim, kRows, kKeys, kConsumers, kQStages, kDoutStages, kSoftCap>;

    static cudaError_t load(DType dtype, bool soft_cap) {
        return with_config<Config>(dtype, soft_cap, [](auto config) { return load_backward<decltype(config)>(); });
    }
    static cudaError_t launch(const BackwardParams& params, const BackwardLaunch& launch,
                              const BackwardWorkspace& workspace, cudaStream_t stream) {
        return with_config<Config>(params.dtype, params.soft_cap > 0, [&](auto config) {
            return launch_backward<decltype(config)>(params, launch, workspace, stream);
        });
    }
    static constexpr BackwardKernel kKernel{kDim, kVDim, {kRows, kKeys}, load, launch};
};

}  // namespace jaxmagi::sm90
