#include <algorithm>

#include "csrc/attention/sm90/backward/passes.h"
#include "csrc/attention/sm90/logits.cuh"

namespace jaxmagi::sm90 {
namespace {

constexpr int kThreads = 256, kWarpSize = 32;
constexpr int kHeads = kWarpSize, kRows = 64;  // heads and rows of a CTA of transpose_rows
constexpr int kMostBlockRows = 128;

struct RowsArguments {
    const float *lse, *delta;
    EightRows* rows;
    int q_len, heads, rows_per_head, ctas_per_example;
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
        const int64_t at = (example * args.q_len + position) * args.heads + head;
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
__global__ void __launch_bounds__(kThreads) transpose_rows(const __grid_constant__ RowsArguments args) {
    __shared__ StagedRows staged;
    const int first_head = blockIdx.y * kHeads, first_row = blockIdx.x % args.ctas_per_example * kRows;
    const int64_t example = blockIdx.x / args.ctas_per_example;
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
    int* tile_ranks;
    int capacity, key_tiles;
    int blocks_per_head, block_rows;  // blocks of queries, and the rows of one
};

// Inverts the order of the tiles in the tile schedule. Masks are along x, since there may be more than a grid's height.
__global__ void __launch_bounds__(kThreads) find_tile_ranks(const __grid_constant__ OrderArguments args) {
    const int64_t first = int64_t{blockIdx.x} * args.key_tiles;
    for (int i = blockIdx.y * kThreads + threadIdx.x; i < args.key_tiles; i += gridDim.y * kThreads)
        args.tile_ranks[first + args.tiles[first + i].tile] = i;
}

// Finds the bands that touch each block of queries of a mask, with a warp for each block. Bands are transposed.
__global__ void __launch_bounds__(kThreads) find_band_ranges(const __grid_constant__ OrderArguments args) {
    const ScheduledBand* bands = args.bands + int64_t{blockIdx.x} * args.capacity;
    Range* ranges = args.band_ranges + int64_t{blockIdx.x} * args.blocks_per_head;
    const int lane = threadIdx.x % kWarpSize, stride = gridDim.y * kThreads / kWarpSize;
    for (int block = (blockIdx.y * kThreads + threadIdx.x) / kWarpSize; block < args.blocks_per_head; block += stride) {
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

void launch_transpose(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                      cudaStream_t stream) {
    const BackwardShape& shape = params.shape;
    const int ctas_per_example = ceil_div(workspace.rows_per_head, kRows);
    const dim3 grid(shape.batch * ctas_per_example, ceil_div(shape.heads, kHeads));
    const RowsArguments args{.lse = params.lse,
                             .delta = params.delta,
                             .rows = workspace.rows,
                             .q_len = shape.q_len,
                             .heads = shape.heads,
                             .rows_per_head = workspace.rows_per_head,
                             .ctas_per_example = ctas_per_example,
                             .block_rows = tile.rows};
    transpose_rows<<<grid, kThreads, 0, stream>>>(args);
}

void launch_order(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                  cudaStream_t stream) {
    const int blocks_per_head = workspace.rows_per_head / tile.rows;
    const OrderArguments args{.bands = params.bands,
                              .tiles = params.tiles,
                              .band_ranges = workspace.band_ranges,
                              .tile_ranks = workspace.tile_ranks,
                              .capacity = params.capacity,
                              .key_tiles = workspace.key_tiles,
                              .blocks_per_head = blocks_per_head,
                              .block_rows = tile.rows};
    constexpr int kMaxCtas = 1024, kWarps = kThreads / kWarpSize;
    const dim3 ranks_grid(params.num_masks, std::min(kMaxCtas, ceil_div(workspace.key_tiles, kThreads)));
    const dim3 ranges_grid(params.num_masks, std::min(kMaxCtas, ceil_div(blocks_per_head, kWarps)));
    find_tile_ranks<<<ranks_grid, kThreads, 0, stream>>>(args);
    if (params.deterministic)
        find_band_ranges<<<ranges_grid, kThreads, 0, stream>>>(args);
}

}  // namespace

cudaError_t prepare_backward(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                             cudaStream_t stream) {
    char* const sums = reinterpret_cast<char*>(workspace.dq);
    const cudaError_t error = cudaMemsetAsync(sums, 0, workspace.bytes_to_clear, stream);
    if (error != cudaSuccess)
        return error;
    launch_transpose(params, workspace, tile, stream);
    launch_order(params, workspace, tile, stream);
    return cudaGetLastError();
}

cudaError_t preload_prepare() {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, transpose_rows);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, find_tile_ranks);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, find_band_ranges) : error;
}

}  // namespace jaxmagi::sm90
