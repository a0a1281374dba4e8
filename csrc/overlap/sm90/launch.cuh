#pragma once

#include <algorithm>

#include "csrc/collectives/launch.cuh"
#include "csrc/common/sm90/tensor_map.h"
#include "csrc/overlap/sm90/kernel.cuh"

// Launches the GEMM. Each collective has a file of its own, so that they are compiled beside each other.

namespace jaxmagi::overlap {

inline CUtensorMapDataType to_map_type(OperandType type) {
    return type == OperandType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Returns how a matrix of so many parts is described: [parts, rows, columns].
inline HeadsTensor matrices(const void* data, OperandType type, int64_t parts, int64_t rows, int64_t columns) {
    return {data, to_map_type(type), parts, rows, 1, 1, columns};
}

// Describes weights and results, of which all examples and ranks, or parts, have rows of their own.
inline cudaError_t encode_weights_and_results(const ProductParams& params, int parts, GemmTensorMaps* maps) {
    const ProductShape& shape = params.shape;
    const bool transposed = params.transposed_w;
    const HeadsTensor w = matrices(params.w, params.type, 1, transposed ? shape.columns : shape.inner,
                                   transposed ? shape.inner : shape.columns);
    const cudaError_t error =
        encode_panel_map(w, 1, transposed ? kTileColumns / kClusterCtas : kPanelColumns, &maps->w);
    if (error != cudaSuccess)
        return error;
    return encode_panel_map(matrices(params.y, params.type, parts, shape.rows, shape.columns), 1, 64, &maps->y);
}

// Calls visit with the configuration of a kernel.
template <Collective kCollective, typename Visit>
cudaError_t with_config(OperandType type, bool transposed_w, Visit visit) {
    if (type == OperandType::kBF16)
        return transposed_w ? visit(GemmConfig<kCollective, BFloat16, true>())
                            : visit(GemmConfig<kCollective, BFloat16, false>());
    return transposed_w ? visit(GemmConfig<kCollective, Float16, true>())
                        : visit(GemmConfig<kCollective, Float16, false>());
}

template <Collective kCollective> cudaError_t preload_gemm(OperandType type, bool transposed_w) {
    return with_config<kCollective>(type, transposed_w, [](auto config) {
        using Config = decltype(config);
        return cudaFuncSetAttribute(gemm_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes);
    });
}

// Returns how many tiles a product has for each rank.
inline int rounds_of(const ProductShape& shape) {
    return shape.examples * TileNumbers(shape).in_example();
}

// Returns how many clusters a product can use on so many multiprocessors.
inline int clusters_of(const ProductShape& shape, int num_sms) {
    return std::min(num_sms / kClusterCtas, rounds_of(shape) * shape.ranks);
}

template <Collective kCollective>
cudaError_t launch_gemm(const ProductParams& params, const GemmTensorMaps& maps, int lag, int num_sms,
                        cudaStream_t stream) {
    const GemmArguments arguments{.shape = params.shape,
                                  .lag = lag,
                                  .received = params.received,
                                  .layout = received_layout(kCollective, params.shape),
                                  .counts = params.counts,
                                  .timeout_ns = params.timeout_ns,
                                  .x = params.x};
    const int ctas = clusters_of(params.shape, num_sms) * kClusterCtas;
    return with_config<kCollective>(params.type, params.transposed_w, [&](auto config) {
        using Config = decltype(config);
        return collectives::launch(gemm_kernel<Config>, ctas, Config::kThreads, Config::kBytes, stream,
                                   {.overlaps = true}, maps, arguments);
    });
}

cudaError_t preload_reduce_scatter(OperandType type, bool transposed_w);
cudaError_t preload_all_gather(OperandType type, bool transposed_w);

}  // namespace jaxmagi::overlap
