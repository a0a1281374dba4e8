#include "csrc/attention/sm90/backward/passes.h"
#include "csrc/attention/sm90/backward/gradient_rows.cuh"
#include "csrc/common/sm90/warpgroup.cuh"

namespace jaxmagi::sm90 {
namespace {

struct ConvertArguments {
    const float* sums;
    const EightRows* rows;
    void* dq;
    bool f32;
    int q_len, heads, dim, kernel_dim, rows_per_head;
    int64_t panel;
    float scale;
};

// The rows that a CTA converts. Fully masked rows have no gradient, whatever their sums are: keys may be infinite.
template <int kRowBlock> struct ConvertedBlock {
    const ConvertArguments& args;
    int blocks_per_head = ceil_div(args.q_len, kRowBlock);
    int all_heads = blockIdx.x / blocks_per_head, first = blockIdx.x % blocks_per_head * kRowBlock;
    int64_t in_workspace = int64_t{all_heads} * args.rows_per_head + first;  // the first row

    __device__ __forceinline__ bool is_visible(int row) const {
        return args.rows[in_workspace / 8 + row / 8].lse_log2[row % 8] != INFINITY;
    }
    __device__ __forceinline__ int position(int row) const { return first + row; }
    // Returns the index of a row in [batch, q_len, heads].
    __device__ __forceinline__ int64_t index(int row) const {
        const int64_t example = all_heads / args.heads;
        return (example * args.q_len + position(row)) * args.heads + all_heads % args.heads;
    }
};

template <typename Element>
__global__ void __launch_bounds__(kWarpgroupThreads) convert(const __grid_constant__ ConvertArguments args) {
    const ConvertedBlock<64> block{args};
    const unsigned thread = threadIdx.x, lane = thread % 32, first = thread / 32 * 16 + lane / 4;
    GradientRows<Element> out{.to = args.dq, .f32 = args.f32, .dim = args.dim, .lane = lane};
    bool visible[2];
    for (int r = 0; r < 2; ++r) {
        const int row = static_cast<int>(first) + 8 * r;
        out.first[r] = block.index(row);
        out.wanted[r] = block.position(row) < args.q_len;
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
        float4* const to = reinterpret_cast<float4*>(static_cast<float*>(args.dq) + at);
        to[0] = {x[0], x[1], x[2], x[3]};
        to[1] = {x[4], x[5], x[6], x[7]};
    } else {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.dq) + at) = {
            Element::pack(x[0], x[1]), Element::pack(x[2], x[3]), Element::pack(x[4], x[5]), Element::pack(x[6], x[7])};
    }
}

// Rows of a row block with transposed sums.
constexpr int kTransposedRows = 80;
static_assert(has_transposed_sums(row_block_of(kTransposedRows)));

// Converts transposed sums of at most 128 columns. A thread has 8 columns, which are 8 rows of an accumulator, of every
// eighth query.
template <typename Element>
__global__ void __launch_bounds__(kWarpgroupThreads) convert_transposed(const __grid_constant__ ConvertArguments args) {
    constexpr int kRowBlock = kTransposedRows;
    const ConvertedBlock<kRowBlock> block{args};
    const int thread = threadIdx.x, first = thread % 32 / 4, eight = thread / 32 * 4 + thread % 4;
    // The first column's address has terms for panel, warp and half of the accumulator, and for the query.
    const float* const from = args.sums + eight / 8 * args.panel + block.in_workspace * kPanelColumns +
                              eight % 8 / 2 * 128 + eight % 2 * 2 + first / 2 * 4 + first % 2;
    if (eight * 8 >= args.dim)
        return;
#pragma unroll 2
    for (int i = 0; i < kRowBlock / 8; ++i) {
        const int row = 8 * i + first;
        const bool visible = block.is_visible(row);
        float x[8];
#pragma unroll
        for (int column = 0; column < 8; ++column)
            x[column] = visible ? from[i * 4 * kWarpgroupThreads + column * 16] * args.scale : 0.f;
        if (block.position(row) < args.q_len)
            store<Element>(args, block.index(row) * args.dim + eight * 8, x);
    }
}

template <typename Element> auto kernel_for(bool transposed) {
    return transposed ? convert_transposed<Element> : convert<Element>;
}

}  // namespace

cudaError_t convert_dq(const BackwardParams& params, const BackwardWorkspace& workspace, int kernel_dim,
                       cudaStream_t stream) {
    const BackwardShape& shape = params.shape;
    const ConvertArguments args{.sums = workspace.dq,
                                .rows = workspace.rows,
                                .dq = params.dq,
                                .f32 = params.gradients_f32,
                                .q_len = shape.q_len,
                                .heads = shape.heads,
                                .dim = shape.dim,
                                .kernel_dim = kernel_dim,
                                .rows_per_head = workspace.rows_per_head,
                                .panel = workspace.dq_panel,
                                .scale = params.scale};
    const bool transposed = has_transposed_sums(workspace.row_block);
    const auto kernel =
        params.dtype == DType::kBF16 ? kernel_for<BFloat16>(transposed) : kernel_for<Float16>(transposed);
    const int blocks_per_head = ceil_div(shape.q_len, workspace.row_block);
    kernel<<<shape.batch * shape.heads * blocks_per_head, kWarpgroupThreads, 0, stream>>>(args);
    return cudaGetLastError();
}

cudaError_t preload_convert() {
    cudaFuncAttributes attributes;
    for (const bool transposed : {false, true})
        for (const auto kernel : {kernel_for<BFloat16>(transposed), kernel_for<Float16>(transposed)})
            if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
                return error;
    return cudaSuccess;
}

}  // namespace jaxmagi::sm90
