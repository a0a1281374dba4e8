#include "csrc/overlap/sm90/launch.cuh"
#include "csrc/overlap/sm90/push.h"

namespace jaxmagi::overlap {
namespace {

// Multiprocessors that send rows, and those that NCCL may hold beside. Neither may be kept from rows by tiles that wait
// for rows: ranks would wait for each other, by way of NCCL's kernels.
constexpr int kPushSms = 16, kNcclSms = 32;

// Returns the multiprocessors of the launch behind the one that pushes rows: half of them if there are few.
int late_sms(int num_sms) {
    return std::min(kPushSms + kNcclSms, num_sms / 4 * kClusterCtas);
}

}  // namespace

// The launch in `stream` leaves multiprocessors to the one that pushes rows. Behind that one, these go on with the tiles
// that are left.
cudaError_t all_gather_matmul(const ProductParams& params, cudaStream_t stream, cudaStream_t rows_stream) {
    const ProductShape& shape = params.shape;
    const ReceivedLayout layout = received_layout(Collective::kAllGather, shape);
    const int late = late_sms(params.num_sms);
    GemmTensorMaps maps{};
    const HeadsTensor own = matrices(params.x, params.type, shape.examples, shape.rows, shape.inner);
    const HeadsTensor gathered = matrices(params.received + layout.data, params.type,
                                          int64_t{shape.ranks - 1} * shape.examples, shape.rows, shape.inner);
    for (const cudaError_t error :
         {encode_panel_map(own, 1, kTileRows, &maps.x), encode_panel_map(gathered, 1, kTileRows, &maps.gathered),
          encode_weights_and_results(params, shape.examples * shape.ranks, &maps),
          push_rows({shape, params.x, params.received, layout}, std::min(kPushSms, late), rows_stream)})
        if (error != cudaSuccess)
            return error;
    const auto launch = [&](int num_sms, cudaStream_t in) {
        return launch_gemm<Collective::kAllGather>(params, maps, 0, num_sms, in);
    };
    const cudaError_t error = launch(params.num_sms - late, stream);
    return error == cudaSuccess ? launch(late, rows_stream) : error;
}

cudaError_t preload_all_gather(OperandType type, bool transposed_w) {
    const cudaError_t error = preload_push();
    return error == cudaSuccess ? preload_gemm<Collective::kAllGather>(type, transposed_w) : error;
}

}  // namespace jaxmagi::overlap
