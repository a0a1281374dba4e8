#include "csrc/overlap/reduce_scatter.h"

#include <algorithm>

#include "csrc/common/sm90/tensor_map.h"
#include "csrc/overlap/sm90/kernel.cuh"

namespace jaxmagi::overlap {
namespace {

constexpr size_t kAlignment = 1024;  // of flags and tiles
constexpr int kMostRanks = 64;

// Waves of clusters by which own tiles are behind those of other ranks: a tile takes about as long as a wave of them
// until it has come.
constexpr int kLagWaves = 2;

size_t aligned(size_t bytes) {
    return ceil_div(bytes, kAlignment) * kAlignment;
}

int rounds_of(const ReduceScatterShape& shape) {
    return shape.examples * TileNumbers(shape).in_example();
}

CUtensorMapDataType to_map_type(OperandType type) {
    return type == OperandType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

cudaError_t encode_maps(const ReduceScatterParams& params, GemmTensorMaps* maps) {
    const ReduceScatterShape& shape = params.shape;
    const CUtensorMapDataType type = to_map_type(params.type);
    const HeadsTensor x{params.x, type, int64_t{shape.examples} * shape.ranks, shape.rows, 1, 1, shape.inner};
    const HeadsTensor y{params.y, type, shape.examples, shape.rows, 1, 1, shape.columns};
    const HeadsTensor w{params.w, type, 1, params.transposed_w ? shape.columns : shape.inner, 1, 1,
                        params.transposed_w ? shape.inner : shape.columns};
    const int w_rows = params.transposed_w ? kTileColumns / kClusterCtas : kPanelColumns;
    for (const cudaError_t error : {encode_panel_map(x, 1, kTileRows, &maps->x), encode_panel_map(w, 1, w_rows, &maps->w),
                                    encode_panel_map(y, 1, 64, &maps->y)})
        if (error != cudaSuccess)
            return error;
    return cudaSuccess;
}

// Calls visit with the configuration of a kernel.
template <typename Visit> cudaError_t with_config(OperandType type, bool transposed_w, Visit visit) {
    if (type == OperandType::kBF16)
        return transposed_w ? visit(GemmConfig<BFloat16, true>()) : visit(GemmConfig<BFloat16, false>());
    return transposed_w ? visit(GemmConfig<Float16, true>()) : visit(GemmConfig<Float16, false>());
}

template <typename Config> cudaError_t allow_shared_memory(Config) {
    return cudaFuncSetAttribute(gemm_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes);
}

}  // namespace

ReceivedLayout received_layout(const ReduceScatterShape& shape) {
    using Config = GemmConfig<BFloat16, false>;
    const int64_t parts = int64_t{rounds_of(shape)} * kClusterCtas * Config::kConsumers * (shape.ranks - 1);
    const size_t failure = kMostRanks * sizeof(uint64_t), claimed = failure + sizeof(uint32_t),
                 flags = claimed + sizeof(uint32_t);
    const size_t tiles = aligned(flags + parts * sizeof(uint32_t));
    return {.failure = failure,
            .claimed = claimed,
            .flags = flags,
            .tiles = tiles,
            .bytes = tiles + parts * kPanels * Config::kPanelBytes,
            .num_flags = parts};
}

cudaError_t matmul_reduce_scatter(const ReduceScatterParams& params, cudaStream_t stream) {
    GemmTensorMaps maps;
    if (const cudaError_t error = encode_maps(params, &maps); error != cudaSuccess)
        return error;
    const int rounds = rounds_of(params.shape), clusters = std::min(params.num_sms / kClusterCtas, rounds * params.shape.ranks);
    const GemmArguments arguments{.shape = params.shape,
                                  .lag = std::min(rounds, ceil_div(kLagWaves * clusters, params.shape.ranks)),
                                  .received = params.received,
                                  .layout = received_layout(params.shape),
                                  .timeout_ns = params.timeout_ns};
    return with_config(params.type, params.transposed_w, [&](auto config) {
        using Config = decltype(config);
        gemm_kernel<Config><<<clusters * kClusterCtas, Config::kThreads, Config::kBytes, stream>>>(maps, arguments);
        return cudaGetLastError();
    });
}

cudaError_t preload_reduce_scatter(OperandType type, bool transposed_w) {
    return with_config(type, transposed_w, [](auto config) { return allow_shared_memory(config); });
}

}  // namespace jaxmagi::overlap
