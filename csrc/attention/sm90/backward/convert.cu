#include <algorithm>

#include "csrc/attention/sm90/backward/passes.h"
#include "csrc/attention/sm90/backward/gradient_rows.cuh"
#include "csrc/attention/sm90/backward/key_gradients.cuh"
#include "csrc/common/sm90/warpgroup.cuh"

namespace jaxmagi::sm90 {
namespace {

// A SumsLayout as a type.
template <int kRows, bool kColumnsFirst> struct Layout {
    static constexpr int kRowBlock = kRows;
    static constexpr bool kTransposed = kColumnsFirst;
    static constexpr SumsLayout kValue{kRows, kColumnsFirst};
};

// The keys of tiles, each of which has room for tile_keys in the sums.
struct KeysOfTiles {
    const ScheduledTile* tiles;  // [num_masks, num_tiles], in the order of the tile schedule
    const int* ranks;            // [num_masks, num_tiles]: a tile's place there
    int num_masks, num_tiles, tile_keys;

    __device__ __forceinline__ Range keys_of(int example, int tile) const {
        const int64_t first = num_masks == 1 ? 0 : int64_t{example} * num_tiles;
        return tiles[first + ranks[first + tile]].rows;
    }
};

// Sums of rows, which are those of queries or of keys, and how many CTAs convert them.
struct ConvertArguments {
    const float* sums;
    const EightRows* rows;  // null for keys, whose sums are zero where they are fully masked
    void* to;
    bool f32;
    int begin, end;  // the rows of sums that are converted
    int shift, end_position;  // position = row + shift; the end of the positions that exist
    int length, heads, row_heads, dim, kernel_dim, rows_per_head;
    float scale;
    int num_ctas;

    // Returns the arguments for a CTA of keys, with the place where gradients of these go.
    __device__ __forceinline__ ConvertArguments with_place(const AllKeyGradients& gradients, const KeysOfTiles& tiles,
                                                           int row_block, bool values, int cta) const {
        const int blocks_per_head = ceil_div(end - begin, row_block), example = cta / blocks_per_head / heads;
        const int tile = (begin + cta % blocks_per_head * row_block) / tiles.tile_keys;
        const Range keys = tiles.keys_of(example, tile);
        const KeyGradients& place = gradients.of(gradients.is_final(example, tile));
        ConvertArguments placed = *this;
        placed.shift = keys.begin - tile * tiles.tile_keys;
        placed.end_position = keys.end;
        placed.to = values ? place.dv : place.dk;
        placed.f32 = place.f32;
        placed.length = place.length;
        placed.row_heads = place.row_heads;
        return placed;
    }
};

// The rows that a CTA converts. Fully masked rows have no gradient, whatever their sums are: keys may be infinite.
template <int kRowBlock> struct ConvertedBlock {
    const ConvertArguments& args;
    int cta;
    int blocks_per_head = ceil_div(args.end - args.begin, kRowBlock);
    int all_heads = cta / blocks_per_head, first = args.begin + cta % blocks_per_head * kRowBlock;
    int64_t in_workspace = int64_t{all_heads} * args.rows_per_head + first;  // the first row

    __device__ __forceinline__ bool is_visible(int row) const {
        return args.rows == nullptr or args.rows[in_workspace / 8 + row / 8].lse_log2[row % 8] != INFINITY;
    }
    __device__ __forceinline__ int position(int row) const { return first + row + args.shift; }
    __device__ __forceinline__ bool exists(int row) const { return position(row) < args.end_position; }
    // Returns the index of a row in [batch, length, row_heads].
    __device__ __forceinline__ int64_t index(int row) const {
        const int64_t example = all_heads / args.heads;
        return (example * args.length + position(row)) * args.row_heads + all_heads % args.heads;
    }
};

template <typename Element> __device__ __forceinline__ void convert(const ConvertArguments& args, int cta) {
    const ConvertedBlock<64> block{args, cta};
    const unsigned thread = threadIdx.x, lane = thread % 32, first = thread / 32 * 16 + lane / 4;
    GradientRows<Element> out{.to = args.to, .f32 = args.f32, .dim = args.dim, .lane = lane};
    bool visible[2];
    for (int r = 0; r < 2; ++r) {
        const int row = static_cast<int>(first) + 8 * r;
        out.first[r] = block.index(row);
        out.wanted[r] = block.exists(row);
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

// Converts transposed sums. A thread has 8 columns of every 128, which are 8 rows of an accumulator, of every eighth
// row.
template <typename Element, int kRowBlock>
__device__ __forceinline__ void convert_transposed(const ConvertArguments& args, int cta) {
    const ConvertedBlock<kRowBlock> block{args, cta};
    const int thread = threadIdx.x, first = thread % 32 / 4;
    const int64_t head_row = int64_t{block.all_heads} * args.rows_per_head * panels(args.kernel_dim);
    for (int eight = thread / 32 * 4 + thread % 4; eight * 8 < args.dim; eight += 16) {
        // The first column's address has terms for panel, warp and half of the accumulator, and for the row.
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
            if (block.exists(row))
                store<Element>(args, block.index(row) * args.dim + eight * 8, x);
        }
    }
}

// The sums of dQ and, where they may be sums too, of dK and dV. With whole groups nothing was added to these.
struct ConvertAllArguments {
    ConvertArguments dq, dk, dv;
    WholeGroups whole_groups;
    AllKeyGradients gradients;
    KeysOfTiles tiles;
};

// Converts all sums in one launch, since a launch takes longer than the sums of a short sequence.
template <typename Element, typename QueryLayout, typename KeyLayout>
__global__ void __launch_bounds__(kWarpgroupThreads) convert_all(const __grid_constant__ ConvertAllArguments args) {
    const auto run = [](auto layout, const ConvertArguments& sums, int cta) {
        using Sums = decltype(layout);
        static_assert(Sums::kTransposed or Sums::kRowBlock == 64);
        if constexpr (Sums::kTransposed)
            convert_transposed<Element, Sums::kRowBlock>(sums, cta);
        else
            convert<Element>(sums, cta);
    };
    int cta = blockIdx.x;
    if (cta < args.dq.num_ctas)
        return run(QueryLayout{}, args.dq, cta);
    if (args.whole_groups.chosen())
        return;
    cta -= args.dq.num_ctas;
    const bool values = cta >= args.dk.num_ctas;
    cta -= values ? args.dk.num_ctas : 0;
    const ConvertArguments& sums = values ? args.dv : args.dk;
    run(KeyLayout{}, sums.with_place(args.gradients, args.tiles, KeyLayout::kRowBlock, values, cta), cta);
}

using ConvertKernel = void (*)(ConvertAllArguments);

// The layouts of dQ, and of dK and dV, of the kernels of backward.cu.
struct ConvertInstance {
    SumsLayout queries, keys;
    ConvertKernel bf16, f16;
};
template <typename Queries, typename Keys>
constexpr ConvertInstance kInstance{Queries::kValue, Keys::kValue, convert_all<BFloat16, Queries, Keys>,
                                    convert_all<Float16, Queries, Keys>};
constexpr ConvertInstance kInstances[] = {kInstance<Layout<64, false>, Layout<64, false>>,
                                          kInstance<Layout<80, true>, Layout<64, false>>,
                                          kInstance<Layout<64, false>, Layout<64, true>>};

ConvertKernel find_convert(DType dtype, const BackwardWorkspace& workspace) {
    for (const ConvertInstance& instance : kInstances)
        if (instance.queries == workspace.dq_layout and
            (workspace.dk == nullptr or instance.keys == workspace.key_layout))
            return dtype == DType::kBF16 ? instance.bf16 : instance.f16;
    return nullptr;
}

int num_blocks(int all_heads, int length, SumsLayout layout) {
    return all_heads * ceil_div(length, layout.row_block);
}

}  // namespace

cudaError_t convert_sums(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                         int kernel_dim, int kernel_v_dim, const ConvertedSums& sums, cudaStream_t stream) {
    const BackwardShape& shape = params.shape;
    ConvertArguments dq{.sums = workspace.dq,
                        .rows = workspace.rows,
                        .to = params.dq,
                        .f32 = params.dq_f32,
                        .begin = 0,
                        .end = shape.q_len,
                        .shift = 0,
                        .end_position = shape.q_len,
                        .length = shape.q_len,
                        .heads = shape.heads,
                        .row_heads = params.row_heads,
                        .dim = shape.dim,
                        .kernel_dim = kernel_dim,
                        .rows_per_head = workspace.rows_per_head,
                        .scale = params.scale,
                        .num_ctas = num_blocks(shape.batch * shape.heads, shape.q_len, workspace.dq_layout)};
    ConvertArguments dk{.sums = workspace.dk,
                        .rows = nullptr,
                        .to = nullptr,  // set by with_place()
                        .f32 = false,
                        .begin = sums.key_tiles.begin * tile.keys,
                        .end = sums.key_tiles.end * tile.keys,
                        .shift = 0,         // set by with_place()
                        .end_position = 0,  // set by with_place()
                        .length = 0,
                        .heads = shape.kv_heads,
                        .row_heads = 0,
                        .dim = shape.dim,
                        .kernel_dim = kernel_dim,
                        .rows_per_head = workspace.rows_per_key_head,
                        .scale = 1.f,
                        .num_ctas = 0};
    if (not sums.queries)
        dq.num_ctas = 0;
    if (workspace.dk != nullptr and not is_empty(sums.key_tiles))
        dk.num_ctas = num_blocks(shape.batch * shape.kv_heads, dk.end - dk.begin, workspace.key_layout);
    ConvertArguments dv = dk;
    dv.sums = workspace.dv;
    dv.dim = shape.v_dim;
    dv.kernel_dim = kernel_v_dim;
    const ConvertKernel kernel = find_convert(params.dtype, workspace);
    if (kernel == nullptr)
        return cudaErrorInvalidValue;
    const int num_ctas = dq.num_ctas + 2 * dk.num_ctas;
    if (num_ctas == 0)
        return cudaSuccess;
    const WholeGroups whole_groups = make_whole_groups(params, kernel_dim);
    const AllKeyGradients gradients = make_key_gradients(params, tile);
    const KeysOfTiles tiles{params.tiles, workspace.tile_ranks, params.num_masks, workspace.key_tiles, tile.keys};
    kernel<<<num_ctas, kWarpgroupThreads, 0, stream>>>({dq, dk, dv, whole_groups, gradients, tiles});
    return cudaGetLastError();
}

cudaError_t preload_convert() {
    cudaFuncAttributes attributes;
    for (const ConvertInstance& instance : kInstances)
        for (const ConvertKernel kernel : {instance.bf16, instance.f16})
            if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
                return error;
    return cudaSuccess;
}

}  // namespace jaxmagi::sm90
