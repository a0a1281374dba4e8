#include "csrc/attention/sm90/backward/passes.h"
#include "csrc/attention/sm90/backward/gradient_rows.cuh"
#include "csrc/common/sm90/warpgroup.cuh"

namespace jaxmagi::sm90 {
namespace {

// Sums of rows, which are those of queries or of keys.
struct ConvertArguments {
    const float* sums;
    const EightRows* rows;  // null for keys, whose sums are zero where they are fully masked
    void* to;
    bool f32;
    int length, heads, dim, kernel_dim, rows_per_head;
    float scale;
};

// The rows that a CTA converts. Fully masked rows have no gradient, whatever their sums are: keys may be infinite.
template <int kRowBlock> struct ConvertedBlock {
    const ConvertArguments& args;
    int blocks_per_head = ceil_div(args.length, kRowBlock);
    int all_heads = blockIdx.x / blocks_per_head, first = blockIdx.x % blocks_per_head * kRowBlock;
    int64_t in_workspace = int64_t{all_heads} * args.rows_per_head + first;  // the first row

    __device__ __forceinline__ bool is_visible(int row) const {
        return args.rows == nullptr or args.rows[in_workspace / 8 + row / 8].lse_log2[row % 8] != INFINITY;
    }
    __device__ __forceinline__ int position(int row) const { return first + row; }
    // Returns the index of a row in [batch, length, heads].
    __device__ __forceinline__ int64_t index(int row) const {
        const int64_t example = all_heads / args.heads;
        return (example * args.length + position(row)) * args.heads + all_heads % args.heads;
    }
};

template <typename Element>
__global__ void __launch_bounds__(kWarpgroupThreads) convert(const __grid_constant__ ConvertArguments args) {
    const ConvertedBlock<64> block{args};
    const unsigned thread = threadIdx.x, lane = thread % 32, first = thread / 32 * 16 + lane / 4;
    GradientRows<Element> out{.to = args.to, .f32 = args.f32, .dim = args.dim, .lane = lane};
    bool visible[2];
    for (int r = 0; r < 2; ++r) {
        const int row = static_cast<int>(first) + 8 * r;
        out.first[r] = block.index(row);
        out.wanted[r] = block.position(row) < args.length;
        visible[r] = block.is_visible(row);
    }
    const float4* from = reinterpret_cast<const float4*>(args.sums + block.in_workspace * args.kernel_dim) + thread;
    for (int column = 0; column < args.dim; column += 32) {
        float part[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 x = from[(column / 8 + i) * kWarpgroupThreads];
            part[4 * i] = visible[0] ? x.x * args.scale : 0.f;
            part[4 * i + 1] = visible[0] ? x.y * args.scale : 0.f;
            part[4 * i + 2] = visible[1] ? x.z * args.scale : 0.f;
            part[4 * i + 3] = visible[1] ? x.w * args.scale : 0.f;
        }
        out.store(part, column);
    }
}

// Stores eight numbers of a row.
template <typename Element>
__device__ __forceinline__ void store(const ConvertArguments& args, int64_t at, const float (&x)[8]) {
    if (args.f32) {
        float4* const to = reinterpret_cast<float4*>(static_cast<float*>(args.to) + at);
        to[0] = {x[0], x[1], x[2], x[3]};
        to[1] = {x[4], x[5], x[6], x[7]};
    } else {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.to) + at) = {
            Element::pack(x[0], x[1]), Element::pack(x[2], x[3]), Element::pack(x[4], x[5]), Element::pack(x[6], x[7])};
    }
}

// Converts transposed sums. A CTA has at most 128 columns, a thread 8 of them, which are 8 rows of an accumulator, of
// every eighth row.
template <typename Element, int kRowBlock>
__global__ void __launch_bounds__(kWarpgroupThreads) convert_transposed(const __grid_constant__ ConvertArguments args) {
    const ConvertedBlock<kRowBlock> block{args};
    const int thread = threadIdx.x, first = thread % 32 / 4, eight = blockIdx.y * 16 + thread / 32 * 4 + thread % 4;
    if (eight * 8 >= args.dim)
        return;
    // The first column's address has terms for panel, warp and half of the accumulator, and for the row.
    const int64_t head_row = int64_t{block.all_heads} * args.rows_per_head * panels(args.kernel_dim);
    const int64_t row_in_sums = head_row + int64_t{eight / 8} * args.rows_per_head + block.first;
    const float* const from = args.sums + row_in_sums * kPanelColumns + eight % 8 / 2 * 128 + eight % 2 * 2 +
                              first / 2 * 4 + first % 2;
#pragma unroll 2
    for (int i = 0; i < kRowBlock / 8; ++i) {
        const int row = 8 * i + first;
        const bool visible = block.is_visible(row);
        float x[8];
#pragma unroll
        for (int column = 0; column < 8; ++column)
            x[column] = visible ? from[i * 4 * kWarpgroupThreads + column * 16] * args.scale : 0.f;
        if (block.position(row) < args.length)
            store<Element>(args, block.index(row) * args.dim + eight * 8, x);
    }
}

using ConvertKernel = void (*)(ConvertArguments);

template <typename Element> ConvertKernel kernel_for(SumsLayout layout) {
    if (not layout.transposed)
        return convert<Element>;
    switch (layout.row_block) {
    case 64:
        return convert_transposed<Element, 64>;
    case 80:
        return convert_transposed<Element, 80>;
    default:
        return nullptr;
    }
}

cudaError_t launch_convert(const BackwardParams& params, const ConvertArguments& args, SumsLayout layout,
                           cudaStream_t stream) {
    const ConvertKernel kernel =
        params.dtype == DType::kBF16 ? kernel_for<BFloat16>(layout) : kernel_for<Float16>(layout);
    if (kernel == nullptr)
        return cudaErrorInvalidValue;
    const int blocks = params.shape.batch * args.heads * ceil_div(args.length, layout.row_block);
    const dim3 grid(blocks, layout.transposed ? ceil_div(args.dim, 128) : 1);
    kernel<<<grid, kWarpgroupThreads, 0, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace

cudaError_t convert_sums(const BackwardParams& params, const BackwardWorkspace& workspace, int kernel_dim,
                         int kernel_v_dim, cudaStream_t stream) {
    const BackwardShape& shape = params.shape;
    const ConvertArguments queries{.sums = workspace.dq,
                                   .rows = workspace.rows,
                                   .to = params.dq,
                                   .f32 = params.gradients_f32,
                                   .length = shape.q_len,
                                   .heads = shape.heads,
                                   .dim = shape.dim,
                                   .kernel_dim = kernel_dim,
                                   .rows_per_head = workspace.rows_per_head,
                                   .scale = params.scale};
    cudaError_t error = launch_convert(params, queries, workspace.dq_layout, stream);
    if (workspace.dk == nullptr)
        return error;
    ConvertArguments keys = queries;
    keys.rows = nullptr;
    keys.length = shape.kv_len;
    keys.heads = shape.kv_heads;
    keys.rows_per_head = workspace.rows_per_key_head;
    keys.scale = 1.f;
    keys.sums = workspace.dk;
    keys.to = params.dk;
    if (error == cudaSuccess)
        error = launch_convert(params, keys, workspace.key_layout, stream);
    keys.sums = workspace.dv;
    keys.to = params.dv;
    keys.dim = shape.v_dim;
    keys.kernel_dim = kernel_v_dim;
    return error == cudaSuccess ? launch_convert(params, keys, workspace.key_layout, stream) : error;
}

cudaError_t preload_convert() {
    cudaFuncAttributes attributes;
    for (const SumsLayout layout : {SumsLayout{64, false}, {64, true}, {80, true}})
        for (const ConvertKernel kernel : {kernel_for<BFloat16>(layout), kernel_for<Float16>(layout)})
            if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
                return error;
    return cudaSuccess;
}

}  // namespace jaxmagi::sm90
