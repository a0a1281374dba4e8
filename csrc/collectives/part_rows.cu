#include "csrc/collectives/part_rows.h"

#include <algorithm>

#include "csrc/common/sm90/element.cuh"

namespace jaxmagi::collectives {
namespace {

constexpr int kThreads = 256, kVectorsOfThread = 8, kMaxCtas = 1 << 16;

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

__global__ void __launch_bounds__(kThreads) copy_own(const __grid_constant__ OwnRowsParams params) {
    for (const OwnRows& array : params.arrays) {
        const int64_t row_vectors = array.row_bytes / 16, part_vectors = row_vectors / params.parts;
        for_each(params.batch * params.tokens * row_vectors, [&](int64_t i) {
            const int64_t row = i / row_vectors, in_row = i - row * row_vectors, part = in_row / part_vectors;
            const int64_t example = row / params.tokens, token = row - example * params.tokens;
            const int64_t to_row = (part * params.batch + example) * params.rows + token;
            static_cast<uint4*>(array.to)[to_row * part_vectors + in_row - part * part_vectors] =
                static_cast<const uint4*>(array.from)[i];
        });
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

cudaError_t copy_own_rows(const OwnRowsParams& params, cudaStream_t stream) {
    const int64_t row_bytes = std::max(params.arrays[0].row_bytes, params.arrays[1].row_bytes);
    copy_own<<<num_ctas(params.batch * params.tokens * row_bytes / 16), kThreads, 0, stream>>>(params);
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
    cudaError_t error = cudaFuncGetAttributes(&attributes, copy_own);
    for (const auto kernel : {round_all<sm90::BFloat16>, round_all<sm90::Float16>})
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, kernel);
    return error;
}

}  // namespace jaxmagi::collectives
