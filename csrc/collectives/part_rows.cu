#include "csrc/collectives/part_rows.h"

#include <algorithm>
#include <bit>

#include "csrc/collectives/sent_rows.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/element.cuh"

namespace jaxmagi::collectives {
namespace {

constexpr int kThreads = 256, kVectorsOfThread = 8, kMaxCtas = 1 << 16;

// A CTA copies groups of rows one after the other. There are few CTAs, since the copy shares the multiprocessors that
// attention leaves free, each of which has room for two.
constexpr int kCopyCtas = 64, kWarps = kThreads / kWarp;

int num_ctas(int64_t vectors) {
    return static_cast<int>(std::clamp<int64_t>(vectors / (kThreads * kVectorsOfThread), 1, kMaxCtas));
}

// Returns how many rows a warp copies: a power of two, so that blocks have whole groups, and as many as it can have in
// flight at once, if a block has them.
int num_rows_of_warp(int64_t row_bytes) {
    const int64_t in_flight = int64_t{kWarp} * kVectorsOfThread * 16;
    const auto fitting = static_cast<uint64_t>(std::max<int64_t>(in_flight / std::max<int64_t>(row_bytes, 1), 1));
    return static_cast<int>(std::min<uint64_t>(std::bit_floor(fitting), kCopiedBlockRows / kWarps));
}

// Calls `body` with each index below `count` in one thread of the grid.
template <typename Body> __device__ __forceinline__ void for_each(int64_t count, Body body) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
#pragma unroll 4
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride)
        body(i);
}

// A warp copies rows that are behind each other, and has the loads of kVectorsOfThread vectors a thread in flight.
__device__ __forceinline__ void copy_rows(const CopiedRows& array, int64_t row, int64_t to_row, int count) {
    const char* const from = static_cast<const char*>(array.from) + row * array.from_row_bytes;
    char* const to = static_cast<char*>(array.to) + to_row * array.to_row_bytes;
    const int vectors = static_cast<int>(array.bytes / 16), lane = threadIdx.x % kWarp;
    for (int first = lane; first < count * vectors; first += kVectorsOfThread * kWarp) {
        uint4 loaded[kVectorsOfThread];
#pragma unroll
        for (int i = 0; i < kVectorsOfThread; ++i) {
            const int index = first + i * kWarp, in_group = index / vectors;
            if (in_group < count)
                loaded[i] = *reinterpret_cast<const uint4*>(from + in_group * array.from_row_bytes +
                                                            (index - in_group * vectors) * 16);
        }
#pragma unroll
        for (int i = 0; i < kVectorsOfThread; ++i) {
            const int index = first + i * kWarp, in_group = index / vectors;
            if (in_group < count)
                *reinterpret_cast<uint4*>(to + in_group * array.to_row_bytes + (index - in_group * vectors) * 16) =
                    loaded[i];
        }
    }
}

// Copies a group of rows of an example, from `first` on, so many by each warp.
__device__ void copy_group(const CopiedRowsParams& params, int64_t example, int64_t first, int rows_of_warp) {
    const int64_t row = first + threadIdx.x / kWarp * rows_of_warp;
    const int count = static_cast<int>(min(params.count - row, int64_t{rows_of_warp}));
    for (const CopiedRows& array : params.arrays)
        copy_rows(array, example * params.from_rows + row, example * params.to_rows + row, count);
}

// Each lane finds out about one of the CTA's groups, so that those which are not copied cost little.
__global__ void __launch_bounds__(kThreads)
    copy_part(const __grid_constant__ CopiedRowsParams params, int rows_of_warp) {
    const int group_rows = kWarps * rows_of_warp;
    const int64_t groups = ceil_div(params.count, int64_t{group_rows});
    const int64_t blocks = ceil_div(params.count, kCopiedBlockRows);
    const int64_t of_all = params.batch * groups;
    const auto example_of = [&](int64_t group) { return group / groups; };
    const auto row_of = [&](int64_t group) { return group % groups * group_rows; };
    for (int64_t begin = blockIdx.x; begin < of_all; begin += int64_t{kWarp} * gridDim.x) {
        const int64_t mine = begin + threadIdx.x % kWarp * int64_t{gridDim.x};
        const bool is_copied =
            mine < of_all and
            (params.copied == nullptr or params.copied[example_of(mine) * blocks + row_of(mine) / kCopiedBlockRows]);
        for (unsigned left = __ballot_sync(~0u, is_copied); left != 0; left &= left - 1) {
            const int64_t group = begin + (__ffs(left) - 1) * int64_t{gridDim.x};
            copy_group(params, example_of(group), row_of(group), rows_of_warp);
        }
    }
}

// A warp finds out about a block.
__global__ void __launch_bounds__(kSentThreads)
    find_blocks(const SentBlocks blocks, const Send* sends, int entries, int64_t all_blocks) {
    const int64_t index = int64_t{blockIdx.x} * (kSentThreads / kWarp) + threadIdx.x / kWarp;
    if (index >= all_blocks)
        return;
    const int64_t example = index / blocks.count, begin = (index - example * blocks.count) * blocks.rows;
    bool is_sent = false;
    for (int i = threadIdx.x % kWarp; i < entries; i += kWarp) {
        const Send& send = sends[example * entries + i];
        is_sent = is_sent or (send.length > 0 and send.row < begin + blocks.rows and begin < send.row + send.length);
    }
    is_sent = __any_sync(~0u, is_sent);
    if (threadIdx.x % kWarp == 0)
        blocks.is_sent[index] = is_sent;
}

// Adds the sums of eight numbers to those of the rank itself, if there are any, and rounds.
template <typename Element>
__device__ __forceinline__ uint4 add_eight(const float4* own, const float4* sums, bool is_sent) {
    float4 low = own[0], high = own[1];
    if (is_sent) {
        const float4 more_low = sums[0], more_high = sums[1];
        low = {low.x + more_low.x, low.y + more_low.y, low.z + more_low.z, low.w + more_low.w};
        high = {high.x + more_high.x, high.y + more_high.y, high.z + more_high.z, high.w + more_high.w};
    }
    return {Element::pack(low.x, low.y), Element::pack(low.z, low.w), Element::pack(high.x, high.y),
            Element::pack(high.z, high.w)};
}

// Returns whether a row was stored where it belongs before.
__device__ __forceinline__ bool is_final(const SentBlocks& blocks, int64_t example, int64_t row) {
    const int64_t block = row / blocks.rows;
    return block < blocks.count and not blocks.is_sent[example * blocks.count + block];
}

// A CTA adds kSentRows rows of an example.
template <typename Element>
__global__ void __launch_bounds__(kSentThreads) add_all(const __grid_constant__ GradientRowsParams params) {
    __shared__ bool is_sent[kSentRows];
    const int64_t blocks = ceil_div(params.tokens, kSentRows), example = blockIdx.x / blocks;
    const int64_t begin = (blockIdx.x - example * blocks) * kSentRows, end = min(begin + kSentRows, params.tokens);
    __shared__ bool is_done[kSentRows];
    const int64_t mine = begin + threadIdx.x;
    const bool is_wanted = mine < end and not is_final(params.blocks, example, mine);
    if (not __syncthreads_or(is_wanted))
        return;
    if (threadIdx.x < kSentRows)
        is_done[threadIdx.x] = not is_wanted;
    find_sent_rows(params.sends + example * params.entries, params.entries, begin, end, is_sent);
    for (const GradientRows& array : params.arrays) {
        const int eights = static_cast<int>(array.width / 8), count = static_cast<int>(end - begin) * eights;
        const int64_t own_row = example * params.rows + begin, row = example * params.tokens + begin;
        const auto* const own = reinterpret_cast<const float4*>(array.own) + 2 * own_row * eights;
        const auto* const sums = reinterpret_cast<const float4*>(array.sums) + 2 * row * eights;
        uint4* const to = static_cast<uint4*>(array.to) + row * array.row_width / 8;
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += kSentThreads) {
            const int in_block = i / eights;
            if (is_done[in_block])
                continue;
            to[in_block * array.row_width / 8 + i - in_block * eights] =
                add_eight<Element>(own + 2 * i, sums + 2 * i, is_sent[in_block]);
        }
    }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) round_all(const __grid_constant__ RoundedRowsParams params) {
    for (const RoundedRows& array : params.arrays) {
        const int64_t of_example = (params.rows - params.first) * array.width / 8;
        for_each(params.batch * of_example, [&](int64_t i) {
            const int64_t example = i / of_example;
            const int64_t at = (example * params.rows + params.first) * array.width / 8 + i - example * of_example;
            const float4* const from = reinterpret_cast<const float4*>(array.from) + 2 * at;
            const float4 low = from[0], high = from[1];
            static_cast<uint4*>(array.to)[at] = {Element::pack(low.x, low.y), Element::pack(low.z, low.w),
                                                 Element::pack(high.x, high.y), Element::pack(high.z, high.w)};
        });
    }
}

}  // namespace

cudaError_t copy_part_rows(const CopiedRowsParams& params, cudaStream_t stream) {
    const int rows_of_warp = num_rows_of_warp(std::max(params.arrays[0].bytes, params.arrays[1].bytes));
    const int64_t groups = params.batch * ceil_div(params.count, int64_t{kWarps} * rows_of_warp);
    if (groups == 0)
        return cudaSuccess;
    const auto ctas = static_cast<unsigned>(std::min<int64_t>(groups, kCopyCtas));
    copy_part<<<ctas, kThreads, 0, stream>>>(params, rows_of_warp);
    return cudaGetLastError();
}

cudaError_t find_sent_blocks(const SentBlocks& blocks, const Send* sends, int entries, int64_t batch,
                             cudaStream_t stream) {
    const int64_t all_blocks = batch * blocks.count;
    if (all_blocks == 0)
        return cudaSuccess;
    const int64_t ctas = ceil_div(all_blocks, int64_t{kSentThreads / kWarp});
    find_blocks<<<static_cast<unsigned>(ctas), kSentThreads, 0, stream>>>(blocks, sends, entries, all_blocks);
    return cudaGetLastError();
}

cudaError_t add_gradients(const GradientRowsParams& params, cudaStream_t stream) {
    const auto kernel = params.dtype == DType::kBF16 ? add_all<sm90::BFloat16> : add_all<sm90::Float16>;
    const int64_t ctas = params.batch * ceil_div(params.tokens, kSentRows);
    kernel<<<static_cast<unsigned>(ctas), kSentThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

cudaError_t round_rows(const RoundedRowsParams& params, cudaStream_t stream) {
    const int64_t width = std::max(params.arrays[0].width, params.arrays[1].width);
    const int64_t vectors = params.batch * (params.rows - params.first) * width / 8;
    const auto kernel = params.dtype == DType::kBF16 ? round_all<sm90::BFloat16> : round_all<sm90::Float16>;
    kernel<<<num_ctas(vectors), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

cudaError_t preload_part_rows() {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, copy_part);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, find_blocks);
    for (const auto kernel : {round_all<sm90::BFloat16>, round_all<sm90::Float16>})
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, kernel);
    for (const auto kernel : {add_all<sm90::BFloat16>, add_all<sm90::Float16>})
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, kernel);
    return error;
}

}  // namespace jaxmagi::collectives
