#include <algorithm>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/attention/sm90/logits.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/element.cuh"

namespace jaxmagi::sm90 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kMaxCtas = 1 << 16;

// Returns the log-sum-exp with the sink, and the factor of the output. A row that sees nothing has no sink.
struct WithSink {
    float lse, factor;

    __device__ __forceinline__ static WithSink of(float lse, float sink) {
        if (lse == -INFINITY)
            return {lse, 0.f};
        const float top = fmaxf(lse, sink);
        const float total = top + log1pf(__expf(fminf(lse, sink) - top));
        return {total, __expf(lse - total)};
    }
};

__device__ __forceinline__ bool is_wanted(const UnfinishedResult& result, int64_t row) {
    return result.is_wanted == nullptr or result.is_wanted[row % result.q_len / result.tile_rows] != 0;
}

// A warp finishes one row of one head at a time.
template <typename Element> __global__ void __launch_bounds__(kThreads)
    finish(const __grid_constant__ UnfinishedResult result) {
    const int lane = threadIdx.x % 32;
    const int64_t count = result.rows * result.heads, stride = int64_t{gridDim.x} * kWarps;
    for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count; i += stride) {
        const int64_t row = i / result.heads;
        if (not is_wanted(result, row))
            continue;
        const int head = static_cast<int>(i - row * result.heads);
        const int64_t to = row * result.row_heads + head;
        const auto [lse, factor] = WithSink::of(result.lse[i], result.sinks[head]);
        if (lane == 0)
            result.to_lse[to] = lse;
        const float4* const from = reinterpret_cast<const float4*>(result.out + i * result.v_dim);
        uint2* const to_out = reinterpret_cast<uint2*>(static_cast<uint16_t*>(result.to_out) + to * result.v_dim);
        for (int at = lane; at < result.v_dim / 4; at += 32) {
            const float4 x = from[at];
            to_out[at] = factor == 0.f ? uint2{}
                                       : uint2{Element::pack(x.x * factor, x.y * factor),
                                               Element::pack(x.z * factor, x.w * factor)};
        }
    }
}

}  // namespace

cudaError_t finish_attention_forward(const UnfinishedResult& result, cudaStream_t stream) {
    const int64_t ctas = std::clamp<int64_t>(ceil_div(result.rows * result.heads, int64_t{kWarps}), 1, kMaxCtas);
    const auto kernel = result.dtype == DType::kBF16 ? finish<BFloat16> : finish<Float16>;
    kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(result);
    return cudaGetLastError();
}

cudaError_t preload_finish() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, finish<BFloat16>);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, finish<Float16>) : error;
}

}  // namespace jaxmagi::sm90
