#include "csrc/attention/sm90/backward_passes.h"
#include "csrc/attention/sm90/gradient_rows.cuh"
#include "csrc/common/sm90/warpgroup.cuh"

namespace jaxmagi::sm90 {
namespace {

struct ConvertArguments {
    const float4* sums;
    const RowBlock* rows;
    void* dq;
    bool f32;
    int q_len, heads, dim, kernel_dim, blocks_per_head;
    float scale;
};

// A CTA takes a row block. Rows without logits have no gradient, whatever their sums are: keys may be infinite.
template <typename Element>
__global__ void __launch_bounds__(kWarpgroupThreads) convert(const __grid_constant__ ConvertArguments args) {
    const int64_t row_block = blockIdx.x;
    const int64_t all_heads = row_block / args.blocks_per_head, example = all_heads / args.heads;
    const int head = all_heads % args.heads, block = row_block % args.blocks_per_head;
    const unsigned thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const float* lse_log2 = args.rows[row_block].lse_log2;
    GradientRows<Element> out{.to = args.dq, .f32 = args.f32, .dim = args.dim, .lane = lane};
    bool sighted[2];
    for (int r = 0; r < 2; ++r) {
        const int position = block * kRowBlock + static_cast<int>(row) + 8 * r;
        out.first[r] = (example * args.q_len + position) * args.heads + head;
        out.wanted[r] = position < args.q_len;
        sighted[r] = lse_log2[row + 8 * r] != INFINITY;
    }
    const float4* from = args.sums + row_block * (kRowBlock * args.kernel_dim / 4) + thread;
    for (int column = 0; column < args.dim; column += 32) {
        float part[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 x = from[(column / 8 + i) * kWarpgroupThreads];
            part[4 * i] = sighted[0] ? x.x * args.scale : 0.f;
            part[4 * i + 1] = sighted[0] ? x.y * args.scale : 0.f;
            part[4 * i + 2] = sighted[1] ? x.z * args.scale : 0.f;
            part[4 * i + 3] = sighted[1] ? x.w * args.scale : 0.f;
        }
        out.store(part, column);
    }
}

}  // namespace

cudaError_t convert_dq(const BackwardParams& params, const BackwardWorkspace& workspace, int kernel_dim,
                       cudaStream_t stream) {
    const BackwardShape& shape = params.shape;
    const ConvertArguments args{.sums = reinterpret_cast<const float4*>(workspace.dq),
                                .rows = workspace.rows,
                                .dq = params.dq,
                                .f32 = params.gradients_f32,
                                .q_len = shape.q_len,
                                .heads = shape.heads,
                                .dim = shape.dim,
                                .kernel_dim = kernel_dim,
                                .blocks_per_head = workspace.blocks_per_head,
                                .scale = params.scale};
    const auto kernel = params.dtype == DType::kBF16 ? convert<BFloat16> : convert<Float16>;
    kernel<<<shape.batch * shape.heads * workspace.blocks_per_head, kWarpgroupThreads, 0, stream>>>(args);
    return cudaGetLastError();
}

cudaError_t preload_convert() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, convert<BFloat16>);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, convert<Float16>) : error;
}

}  // namespace jaxmagi::sm90
