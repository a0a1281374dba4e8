#include "csrc/overlap/sm90/launch.cuh"
#include "csrc/overlap/sm90/push.h"

namespace jaxmagi::overlap {
namespace {

// Multiprocessors that send rows, and then compute.
constexpr int kPushSms = 16;

}  // namespace

// The launch in `stream` leaves multiprocessors to the one that pushes rows, which no tile that waits for rows may hold
// up. Behind that one, others go on with the tiles that are left.
cudaError_t all_gather_matmul(const ProductParams& params, cudaStream_t stream, cudaStream_t rows_stream) {
    const ProductShape& shape = params.shape;
    const ReceivedLayout layout = received_layout(Collective::kAllGather, shape);
    const int num_pushing = std::min(kPushSms, params.num_sms / 2) / kClusterCtas * kClusterCtas;
    GemmTensorMaps maps{};
    const HeadsTensor own = matrices(params.x, params.type, shape.examples, shape.rows, shape.inner);
    const HeadsTensor gathered = matrices(params.received + layout.data, params.type,
                                          int64_t{shape.ranks - 1} * shape.examples, shape.rows, shape.inner);
    for (const cudaError_t error :
         {encode_panel_map(own, 1, kTileRows, &maps.x), encode_panel_map(gathered, 1, kTileRows, &maps.gathered),
          encode_weights_and_results(params, shape.examples * shape.ranks, &maps),
          push_rows({shape, params.x, params.received, layout}, num_pushing, rows_stream)})
        if (error != cudaSuccess)
            return error;
    const auto launch = [&](int num_sms, cudaStream_t in) {
        return launch_gemm<Collective::kAllGather>(params, maps, 0, num_sms, in);
    };
    const cudaError_t error = launch(params.num_sms - num_pushing, stream);
    return error == cudaSuccess ? launch(num_pushing, rows_stream) : error;
}

cudaError_t preload_all_gather(OperandType type, bool transposed_w) {
    const cudaError_t error = preload_push();
    return error == cudaSuccess ? preload_gemm<Collective::kAllGather>(type, transposed_w) : error;
}

}  // namespace jaxmagi::overlap
