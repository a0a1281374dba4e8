#include <algorithm>

#include "csrc/attention/sm90/backward/passes.h"
#include "csrc/attention/sm90/logits.cuh"

namespace jaxmagi::sm90 {
namespace {

constexpr int kThreads = 256, kWarpSize = 32;
constexpr int kHeads = kWarpSize, kRows = 64;  // heads and rows of a CTA of transpose_rows
constexpr int kMostBlockRows = 128;
constexpr int kZerosOfCta = 16 * kThreads;  // in units of 16 bytes

struct RowsArguments {
    const float *lse, *delta;
    EightRows* rows;
    int q_len, heads, row_heads, rows_per_head, ctas_per_example, ctas_by_heads;
    int block_rows;  // of a block of queries
};

// The rows of a CTA in shared memory, and as many more as a block that begins with the last of them may have.
struct StagedRows {
    static constexpr int kEights = (kRows + kMostBlockRows) / 8 - 1;

    float lse_log2[kRows][kHeads + 1], delta[kRows][kHeads + 1];
    uint32_t has_masked[kEights];  // a bit for each head: set if any of eight rows exists and is fully masked
};

// Stages eight rows by a warp, with a head for each lane.
__device__ void stage_rows(const RowsArguments& args, StagedRows& staged, int64_t example, int first_row, int head,
                           int eight) {
    const int lane = threadIdx.x % kWarpSize;
    bool has_masked = false;
#pragma unroll
    for (int i = eight * 8; i < eight * 8 + 8; ++i) {
        const int position = first_row + i;
        const int64_t at = (example * args.q_len + position) * args.row_heads + head;
        const bool exists = head < args.heads and position < args.q_len;
        const float lse = exists ? args.lse[at] : -INFINITY;
        has_masked = has_masked or (exists and lse == -INFINITY);
        if (i >= kRows)
            continue;
        staged.lse_log2[i][lane] = lse == -INFINITY ? INFINITY : lse * kLog2E;
        staged.delta[i][lane] = lse == -INFINITY ? 0.f : args.delta[at];
    }
    const uint32_t masked_heads = __ballot_sync(~0u, has_masked);
    if (lane == 0)
        staged.has_masked[eight] = masked_heads;
}

// Writes the rows of one head by a warp.
__device__ void write_rows(const StagedRows& staged, EightRows* to, int num_rows, int head, int block_rows) {
    for (int i = threadIdx.x % kWarpSize; i < num_rows; i += kWarpSize) {
        to[i / 8].lse_log2[i % 8] = staged.lse_log2[i][head];
        to[i / 8].delta[i % 8] = staged.delta[i][head];
        if (i % 8 != 0)
            continue;
        uint32_t masked_heads = 0;
        for (int eight = i / 8; eight < (i + block_rows) / 8; ++eight)
            masked_heads |= staged.has_masked[eight];
        to[i / 8].block_has_masked_rows = masked_heads >> head & 1;
    }
}

// Writes the row statistics. A CTA takes some rows of some heads of an example: heads are contiguous in what it reads,
// positions in what it writes.
__device__ void transpose_rows(const RowsArguments& args, int cta) {
    __shared__ StagedRows staged;
    const int by_rows = cta / args.ctas_by_heads;  // of all examples
    const int first_head = cta % args.ctas_by_heads * kHeads, first_row = by_rows % args.ctas_per_example * kRows;
    const int64_t example = by_rows / args.ctas_per_example;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    for (int eight = warp; eight < (kRows + args.block_rows) / 8 - 1; eight += kThreads / kWarpSize)
        stage_rows(args, staged, example, first_row, first_head + lane, eight);
    __syncthreads();
    const int num_rows = min(kRows, args.rows_per_head - first_row);
    for (int head = warp; head < min(kHeads, args.heads - first_head); head += kThreads / kWarpSize) {
        const int64_t row = (example * args.heads + first_head + head) * args.rows_per_head + first_row;
        write_rows(staged, args.rows + row / 8, num_rows, head, args.block_rows);
    }
}

struct OrderArguments {
    const ScheduledBand* bands;
    const ScheduledTile* tiles;
    Range* band_ranges;
    int *tile_ranks, *longest_first;
    int capacity, key_tiles, own_tiles;
    int blocks_per_head, block_rows;  // blocks of queries, and the rows of one
    int ranks_ctas, ranges_ctas;      // of a mask
};

// Inverts the order of the tiles in the tile schedule, and takes it apart into those of own tiles and of the others.
__device__ void find_tile_ranks(const OrderArguments& args, int cta) {
    const int64_t first = int64_t{cta / args.ranks_ctas} * args.key_tiles;
    const ScheduledTile* const tiles = args.tiles + first;
    const int stride = args.ranks_ctas * kThreads;
    const bool has_both = 0 < args.own_tiles and args.own_tiles < args.key_tiles;
    for (int i = cta % args.ranks_ctas * kThreads + threadIdx.x; i < args.key_tiles; i += stride) {
        args.tile_ranks[first + tiles[i].tile] = i;
        if (not has_both)
            continue;
        const bool is_own = tiles[i].tile < args.own_tiles;
        int before = is_own ? 0 : args.own_tiles;
#pragma unroll 8
        for (int other = 0; other < i; ++other)
            before += tiles[other].tile < args.own_tiles == is_own;
        args.longest_first[first + before] = i;
    }
}

// Finds the bands that touch each block of queries of a mask, with a warp for each block. Bands are transposed.
__device__ void find_band_ranges(const OrderArguments& args, int cta) {
    const int mask = cta / args.ranges_ctas;
    const ScheduledBand* bands = args.bands + int64_t{mask} * args.capacity;
    Range* ranges = args.band_ranges + int64_t{mask} * args.blocks_per_head;
    const int lane = threadIdx.x % kWarpSize, stride = args.ranges_ctas * kThreads / kWarpSize;
    const int first = (cta % args.ranges_ctas * kThreads + threadIdx.x) / kWarpSize;
    for (int block = first; block < args.blocks_per_head; block += stride) {
        const int row = block * args.block_rows;
        int begin = args.capacity, end = 0;
        for (int i = lane; i < args.capacity; i += kWarpSize) {
            if (bands[i].k0 >= row + args.block_rows or bands[i].k1 <= row)
                continue;
            begin = min(begin, i);
            end = max(end, i + 1);
        }
        begin = __reduce_min_sync(~0u, begin);
        end = __reduce_max_sync(~0u, end);
        if (lane == 0)
            ranges[block] = {begin, end};
    }
}

// The workspace's part that begins with zeros, in units of 16 bytes. Those in [key_sums, end_key_sums) are of the sums
// of dK and dV, which are not used if work items have whole groups.
struct ZeroArguments {
    float4* to;
    int64_t count, key_sums, end_key_sums;
    WholeGroups whole_groups;
};

__device__ void zero(const ZeroArguments& args, int cta) {
    const int64_t begin = int64_t{cta} * kZerosOfCta, first = begin + threadIdx.x;
    const bool unused = args.key_sums <= begin and begin + kZerosOfCta <= args.end_key_sums;
    if (unused and args.whole_groups.chosen())
        return;
#pragma unroll 4
    for (int i = 0; i < kZerosOfCta; i += kThreads)
        if (first + i < args.count)
            args.to[first + i] = {0.f, 0.f, 0.f, 0.f};
}

// All of it in one launch, since a launch takes longer than a short sequence. CTAs do one thing each: they are numbered
// by what they do, and `*_end` is the number of the first one that does something else.
struct PrepareArguments {
    RowsArguments rows;
    OrderArguments order;
    ZeroArguments zeros;
    int rows_end, ranks_end, ranges_end;
};

__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ PrepareArguments args) {
    const int cta = blockIdx.x;
    if (cta < args.rows_end)
        transpose_rows(args.rows, cta);
    else if (cta < args.ranks_end)
        find_tile_ranks(args.order, cta - args.rows_end);
    else if (cta < args.ranges_end)
        find_band_ranges(args.order, cta - args.ranks_end);
    else
        zero(args.zeros, cta - args.ranges_end);
}

RowsArguments rows_arguments(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile) {
    return {.lse = params.lse,
            .delta = params.delta,
            .rows = workspace.rows,
            .q_len = params.shape.q_len,
            .heads = params.shape.heads,
            .row_heads = params.row_heads,
            .rows_per_head = workspace.rows_per_head,
            .ctas_per_example = ceil_div(workspace.rows_per_head, kRows),
            .ctas_by_heads = ceil_div(params.shape.heads, kHeads),
            .block_rows = tile.rows};
}

OrderArguments order_arguments(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile) {
    constexpr int kMaxCtas = 1024, kWarps = kThreads / kWarpSize;
    const int blocks_per_head = workspace.rows_per_head / tile.rows;
    return {.bands = params.bands,
            .tiles = params.tiles,
            .band_ranges = workspace.band_ranges,
            .tile_ranks = workspace.tile_ranks,
            .longest_first = workspace.longest_first,
            .capacity = params.capacity,
            .key_tiles = workspace.key_tiles,
            .own_tiles = range_of(params, tile, KeyTiles::kOwn).end,
            .blocks_per_head = blocks_per_head,
            .block_rows = tile.rows,
            .ranks_ctas = std::min(kMaxCtas, ceil_div(workspace.key_tiles, kThreads)),
            .ranges_ctas = std::min(kMaxCtas, ceil_div(blocks_per_head, kWarps))};
}

ZeroArguments zero_arguments(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                             int kernel_dim) {
    float4* const begin = reinterpret_cast<float4*>(workspace.dq);
    const bool has_key_sums = workspace.dk != nullptr;
    return {.to = begin,
            .count = workspace.bytes_to_clear / 16,
            .key_sums = has_key_sums ? reinterpret_cast<float4*>(workspace.dk) - begin : 0,
            .end_key_sums = has_key_sums ? reinterpret_cast<float4*>(workspace.counters) - begin : 0,
            .whole_groups = make_whole_groups(params, kernel_dim)};
}

}  // namespace

cudaError_t prepare_backward(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                             int kernel_dim, cudaStream_t stream) {
    PrepareArguments args{.rows = rows_arguments(params, workspace, tile),
                          .order = order_arguments(params, workspace, tile),
                          .zeros = zero_arguments(params, workspace, tile, kernel_dim)};
    args.rows_end = params.shape.batch * args.rows.ctas_per_example * args.rows.ctas_by_heads;
    args.ranks_end = args.rows_end + params.num_masks * args.order.ranks_ctas;
    args.ranges_end = args.ranks_end + (params.deterministic ? params.num_masks * args.order.ranges_ctas : 0);
    const int64_t ctas = args.ranges_end + ceil_div(args.zeros.count, int64_t{kZerosOfCta});
    if (ctas > INT32_MAX)
        return cudaErrorInvalidConfiguration;
    prepare<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
    return cudaGetLastError();
}

cudaError_t preload_prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, prepare);
}

}  // namespace jaxmagi::sm90
