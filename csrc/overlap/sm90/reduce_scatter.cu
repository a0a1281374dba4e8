#include "csrc/overlap/sm90/launch.cuh"

namespace jaxmagi::overlap {
namespace {

// Waves of clusters by which own tiles are behind those of other ranks: a tile takes about as long as a wave of them
// until it has come.
constexpr int kLagWaves = 2;

}  // namespace

cudaError_t matmul_reduce_scatter(const ProductParams& params, cudaStream_t stream) {
    const ProductShape& shape = params.shape;
    GemmTensorMaps maps{};
    const int64_t parts = int64_t{shape.examples} * shape.ranks;
    const HeadsTensor x = matrices(params.x, params.type, parts, shape.rows, shape.inner);
    for (const cudaError_t error :
         {encode_panel_map(x, 1, kTileRows, &maps.x), encode_weights_and_results(params, shape.examples, &maps)})
        if (error != cudaSuccess)
            return error;
    const int lag = std::min(rounds_of(shape), ceil_div(kLagWaves * clusters_of(shape, params.num_sms), shape.ranks));
    return launch_gemm<Collective::kReduceScatter>(params, maps, lag, params.num_sms, stream);
}

cudaError_t preload_reduce_scatter(OperandType type, bool transposed_w) {
    return preload_gemm<Collective::kReduceScatter>(type, transposed_w);
}

}  // namespace jaxmagi::overlap
