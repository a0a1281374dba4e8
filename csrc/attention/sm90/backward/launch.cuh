#pragma once

#include <algorithm>

#include "csrc/attention/sm90/backward/kernel.cuh"
#include "csrc/attention/sm90/backward/kernels.h"
#include "csrc/attention/sm90/dispatch.cuh"
#include "csrc/common/sm90/tensor_map.h"

// The host side of a backward kernel.

namespace jaxmagi::sm90 {

inline BackwardSchedules make_schedules(const BackwardParams& params, const BackwardLaunch& launch, int kernel_dim,
                                        TileShape tile) {
    // Tiles of whole groups are so short that neighbours never wait long, as if they were even.
    const int few_heads = heads_of_item(params.shape, kernel_dim), group = params.shape.heads / params.shape.kv_heads;
    return {make_schedule(params, launch, tile, few_heads, false), make_schedule(params, launch, tile, few_heads, true),
            make_schedule(params, launch, tile, group, true)};
}

inline BackwardArguments make_arguments(const BackwardParams& params, const BackwardLaunch& launch,
                                        const BackwardWorkspace& workspace, int kernel_dim, TileShape tile) {
    const BackwardShape& shape = params.shape;
    const bool capped = params.soft_cap > 0;
    const BackwardLaunch others{KeyTiles::kOthers, false, launch.num_sms};
    return {.schedules = make_schedules(params, launch, kernel_dim, tile),
            .others = make_schedules(params, others, kernel_dim, tile),
            .whole_groups = make_whole_groups(params, kernel_dim, tile),
            .workspace = workspace,
            .bands = params.bands,
            .tiles = params.tiles,
            .capacity = params.capacity,
            .q_len = shape.q_len,
            .kv_len = shape.kv_len,
            .heads = shape.heads,
            .kv_heads = shape.kv_heads,
            .dim = shape.dim,
            .v_dim = shape.v_dim,
            .dk = params.dk,
            .dv = params.dv,
            .own_end = range_of(params, tile, KeyTiles::kOwn).end * tile.keys,
            .arrived = launch.arrived,
            .counter = workspace.counters + counter_of(launch.tiles),
            .others_counter = workspace.counters + counter_of(KeyTiles::kOthers),
            .drained = params.drained == nullptr ? nullptr : params.drained + counter_of(launch.tiles),
            .gradients_f32 = params.key_gradients_f32,
            .deterministic = params.deterministic,
            .logit_scale = capped ? params.scale / params.soft_cap : params.scale * kLog2E,
            .cap_log2 = params.soft_cap * kLog2E,
            .scale = params.scale};
}

// Fails if dynamic shared memory does not begin where BackwardMemory has it: behind static one, of which there is none,
// and what the system reserves.
template <typename Config> cudaError_t load_backward() {
    using Memory = BackwardMemory<Config>;
    cudaFuncAttributes attributes;
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, backward_kernel<Config>); error != cudaSuccess)
        return error;
    int device, reserved;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
        return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
        error != cudaSuccess)
        return error;
    if (reserved + static_cast<int>(attributes.sharedSizeBytes) != Memory::kBase)
        return cudaErrorMisalignedAddress;
    return cudaFuncSetAttribute(backward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Memory::kBytes);
}

template <typename Config> cudaError_t encode_maps(const BackwardParams& params, BackwardTensorMaps* maps) {
    const CUtensorMapDataType type = tensor_map_type(params.dtype);
    const auto [batch, q_len, kv_len, heads, kv_heads, dim, v_dim] = params.shape;
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
    const int grid = std::min(launch.num_sms, args.schedules.head_sets.num_claims);
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
