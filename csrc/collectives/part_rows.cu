#include "csrc/collectives/part_rows.h"

#include <algorithm>

#include "csrc/collectives/sent_rows.cuh"
#include "csrc/common/math.h"
#include "csrc/common/sm90/element.cuh"

namespace jaxmagi::collectives {
namespace {

constexpr int kThreads = 256, kVectorsOfThread = 8, kMaxCtas = 1 << 16;
constexpr int kRowsOfWarp = 4;
static_assert(kNeededRows == kSentRows);

int num_ctas(int64_t vectors) {
    return static_cast<int>(std::clamp<int64_t>(vectors / (kThreads * kVectorsOfThread), 1, kMaxCtas));
}

// Calls `body` with each index below `count` in one thread of the grid.
template <typename Body> __device__ __forceinline__ void for_each(int64_t count, Body body) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
#pragma unroll 4
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride)
        body(i);
}

// A warp copies rows that are behind each other, kRowsOfWarp at most, and has loads of all of them in flight.
__device__ void copy_rows(const CopiedRows& array, int64_t row, int64_t to_row, int count) {
    const int64_t from_vectors = array.from_row_bytes / 16, to_vectors = array.to_row_bytes / 16;
    const uint4* const from = static_cast<const uint4*>(array.from) + row * from_vectors;
    uint4* const to = static_cast<uint4*>(array.to) + to_row * to_vectors;
    for (int vector = threadIdx.x % kWarp; vector < array.bytes / 16; vector += kWarp) {
        uint4 vectors[kRowsOfWarp];
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i)
            if (i < count)
                vectors[i] = from[i * from_vectors + vector];
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i)
            if (i < count)
                to[i * to_vectors + vector] = vectors[i];
    }
}

// A CTA copies a block of an example, or those of its rows that are sent.
__global__ void __launch_bounds__(kSentThreads) copy_part(const __grid_constant__ CopiedRowsParams params) {
    __shared__ bool is_sent[kSentRows];
    const int64_t blocks = ceil_div(params.count, kSentRows), example = blockIdx.x / blocks;
    const int64_t block = blockIdx.x - example * blocks, begin = block * kSentRows;
    const int64_t end = min(begin + kSentRows, params.count);
    const bool is_needed = params.needed == nullptr or params.needed[block];
    if (not is_needed)
        find_sent_rows(params.sends + example * params.entries, params.entries, begin, end, is_sent);
    const int64_t first = begin + threadIdx.x / kWarp * kRowsOfWarp;
    for (int64_t row = first; row < end; row += kSentThreads / kWarp * kRowsOfWarp) {
        const int count = static_cast<int>(min(end - row, int64_t{kRowsOfWarp}));
        for (const CopiedRows& array : params.arrays) {
            const int64_t from_row = example * params.from_rows + row, to_row = example * params.to_rows + row;
            if (is_needed)
                copy_rows(array, from_row, to_row, count);
            else
                for (int i = 0; i < count; ++i)
                    if (is_sent[row - begin + i])
                        copy_rows(array, from_row + i, to_row + i, 1);
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
    const int64_t ctas = params.batch * ceil_div(params.count, kSentRows);
    if (ctas == 0)
        return cudaSuccess;
    copy_part<<<static_cast<unsigned>(ctas), kSentThreads, 0, stream>>>(params);
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
