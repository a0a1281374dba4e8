#include <algorithm>

#include "csrc/attention/sm90/backward_passes.h"

namespace jaxmagi::sm90 {
namespace {

constexpr int kThreads = 256, kWarpSize = 32;
constexpr int kHeads = 32;  // of a CTA of transpose_rows
constexpr float kLog2E = 1.4426950408889634f;

struct RowsArguments {
    const float *lse, *delta;
    void* rows;
    int q_len, heads, blocks_per_head;
};

// A CTA takes a row block of some heads of an example: heads lie side by side in what it reads, positions in what it
// writes.
template <typename Rows>
__global__ void __launch_bounds__(kThreads) transpose_rows(const __grid_constant__ RowsArguments args) {
    constexpr int kRowBlock = Rows::kRows;
    __shared__ float lse_log2[kRowBlock][kHeads + 1], delta[kRowBlock][kHeads + 1];
    const int first_head = blockIdx.y * kHeads, block = blockIdx.x % args.blocks_per_head;
    const int64_t example = blockIdx.x / args.blocks_per_head;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const bool has_head = first_head + lane < args.heads;
    for (int i = warp; i < kRowBlock; i += kThreads / kWarpSize) {
        const int position = block * kRowBlock + i;
        const int64_t at = (example * args.q_len + position) * args.heads + first_head + lane;
        const bool exists = has_head and position < args.q_len;
        const float lse = exists ? args.lse[at] : -INFINITY;
        lse_log2[i][lane] = lse == -INFINITY ? INFINITY : lse * kLog2E;
        delta[i][lane] = lse == -INFINITY ? 0.f : args.delta[at];
    }
    __syncthreads();
    const int num_rows = min(kRowBlock, args.q_len - block * kRowBlock);  // may be negative
    for (int head = warp; head < min(kHeads, args.heads - first_head); head += kThreads / kWarpSize) {
        const int64_t row_block = (example * args.heads + first_head + head) * args.blocks_per_head + block;
        Rows& to = static_cast<Rows*>(args.rows)[row_block];
        bool is_blind = false;
        for (int i = lane; i < kRowBlock; i += kWarpSize) {
            to.lse_log2[i] = lse_log2[i][head];
            to.delta[i] = delta[i][head];
            is_blind = is_blind or (i < num_rows and lse_log2[i][head] == INFINITY);
        }
        is_blind = __any_sync(~0u, is_blind);
        if (lane == 0)
            to.has_blind_rows = is_blind;
    }
}

struct OrderArguments {
    const PlannedBand* bands;
    const PlannedTile* tiles;
    Range* windows;
    int* places;
    int capacity, key_tiles, blocks_per_head;
    int row_block, block_rows;  // rows of a row block, and of a block of queries
};

// Plans lie along x, of which there may be more than a grid is high.
__global__ void __launch_bounds__(kThreads) find_places(const __grid_constant__ OrderArguments args) {
    const int64_t first = int64_t{blockIdx.x} * args.key_tiles;
    for (int i = blockIdx.y * kThreads + threadIdx.x; i < args.key_tiles; i += gridDim.y * kThreads)
        args.places[first + args.tiles[first + i].tile] = i;
}

// A warp for each block of queries of a plan; bands are transposed.
__global__ void __launch_bounds__(kThreads) find_windows(const __grid_constant__ OrderArguments args) {
    const PlannedBand* bands = args.bands + int64_t{blockIdx.x} * args.capacity;
    Range* windows = args.windows + int64_t{blockIdx.x} * args.blocks_per_head;
    const int lane = threadIdx.x % kWarpSize, stride = gridDim.y * kThreads / kWarpSize;
    for (int block = (blockIdx.y * kThreads + threadIdx.x) / kWarpSize; block < args.blocks_per_head; block += stride) {
        const int row = block * args.row_block;
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
            windows[block] = {begin, end};
    }
}

void launch_transpose(const BackwardParams& params, const BackwardWorkspace& workspace, cudaStream_t stream) {
    const BackwardShape& shape = params.shape;
    const dim3 grid(shape.batch * workspace.blocks_per_head, ceil_div(shape.heads, kHeads));
    const RowsArguments args{.lse = params.lse,
                             .delta = params.delta,
                             .rows = workspace.rows,
                             .q_len = shape.q_len,
                             .heads = shape.heads,
                             .blocks_per_head = workspace.blocks_per_head};
    with_row_block(workspace.row_block,
                   [&](auto rows) { transpose_rows<decltype(rows)><<<grid, kThreads, 0, stream>>>(args); });
}

void launch_order(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                  cudaStream_t stream) {
    const OrderArguments args{.bands = params.bands,
                              .tiles = params.tiles,
                              .windows = workspace.windows,
                              .places = workspace.places,
                              .capacity = params.capacity,
                              .key_tiles = workspace.key_tiles,
                              .blocks_per_head = workspace.blocks_per_head,
                              .row_block = workspace.row_block,
                              .block_rows = tile.rows};
    constexpr int kMaxCtas = 1024, kWarps = kThreads / kWarpSize;
    const dim3 places_grid(params.plans, std::min(kMaxCtas, ceil_div(workspace.key_tiles, kThreads)));
    const dim3 windows_grid(params.plans, std::min(kMaxCtas, ceil_div(workspace.blocks_per_head, kWarps)));
    find_places<<<places_grid, kThreads, 0, stream>>>(args);
    find_windows<<<windows_grid, kThreads, 0, stream>>>(args);
}

}  // namespace

cudaError_t prepare_backward(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                             cudaStream_t stream) {
    const cudaError_t error = cudaMemsetAsync(workspace.dq, 0, workspace.bytes_to_clear, stream);
    if (error != cudaSuccess)
        return error;
    launch_transpose(params, workspace, stream);
    if (params.deterministic)
        launch_order(params, workspace, tile, stream);
    return cudaGetLastError();
}

cudaError_t preload_prepare() {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, transpose_rows<RowBlock<64>>);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, transpose_rows<RowBlock<80>>);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, find_places);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, find_windows) : error;
}

}  // namespace jaxmagi::sm90
