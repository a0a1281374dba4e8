#include "csrc/overlap/sm90/launch.cuh"

namespace jaxmagi::overlap {

cudaError_t all_gather_matmul(const ProductParams& params, cudaStream_t stream) {
    const ProductShape& shape = params.shape;
    const ReceivedLayout layout = received_layout(Collective::kAllGather, shape);
    GemmTensorMaps maps{};
    const HeadsTensor own = matrices(params.x, params.type, shape.examples, shape.rows, shape.inner);
    const HeadsTensor gathered = matrices(params.received + layout.data, params.type,
                                          int64_t{shape.ranks - 1} * shape.examples, shape.rows, shape.inner);
    for (const cudaError_t error :
         {encode_panel_map(own, 1, kTileRows, &maps.x), encode_panel_map(gathered, 1, kTileRows, &maps.gathered),
          encode_weights_and_results(params, shape.examples * shape.ranks, &maps)})
        if (error != cudaSuccess)
            return error;
    return launch_gemm<Collective::kAllGather>(params, maps, 0, params.num_sms, stream);
}

cudaError_t preload_all_gather(OperandType type, bool transposed_w) {
    return preload_gemm<Collective::kAllGather>(type, transposed_w);
}

}  // namespace jaxmagi::overlap
