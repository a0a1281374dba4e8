#include "csrc/attention/sm90/backward/backward.h"

#include <algorithm>
#include <iterator>

#include "csrc/attention/sm90/backward/kernels.h"
#include "csrc/attention/sm90/backward/passes.h"
#include "csrc/attention/sm90/dispatch.cuh"

namespace jaxmagi::sm90 {
namespace {

// Returns the smallest kernel that holds both dimensions, or nullptr.
const BackwardKernel* find_kernel(int dim, int v_dim) {
    return smallest_kernel<BackwardKernel>(
        {&kBackwardD64, &kBackwardD96, &kBackwardD128, &kBackwardD192V128, &kBackwardD192, &kBackwardD256}, dim, v_dim);
}

struct Pass {
    const BackwardKernel& kernel;
    BackwardWorkspace workspace;
};

Pass find_pass(const BackwardParams& params) {
    const BackwardKernel& kernel = *find_kernel(params.shape.dim, params.shape.v_dim);
    return {kernel, lay_out(static_cast<char*>(params.workspace), params.shape, kernel.tile, kernel.dim, kernel.v_dim,
                            params.num_masks, params.deterministic)};
}

BackwardLaunch all_in_one_launch(const BackwardParams& params) {
    return {.stages = {{KeyTiles::kAll, {0, num_key_heads(params)}, false}},
            .num_stages = 1,
            .first_counter = 0,
            .num_sms = params.num_sms};
}

}  // namespace

std::optional<TileShape> backward_tile(int dim, int v_dim) {
    const BackwardKernel* kernel = find_kernel(dim, v_dim);
    return kernel != nullptr ? std::optional(kernel->tile) : std::nullopt;
}

int64_t backward_workspace_bytes(const BackwardShape& shape, int num_masks, bool deterministic) {
    const BackwardKernel* kernel = find_kernel(shape.dim, shape.v_dim);
    return lay_out(nullptr, shape, kernel->tile, kernel->dim, kernel->v_dim, num_masks, deterministic).bytes;
}

bool has_tiles(const BackwardParams& params, KeyTiles tiles) {
    return not is_empty(range_of(params, find_kernel(params.shape.dim, params.shape.v_dim)->tile, tiles));
}

int num_own_tiles(const BackwardParams& params) {
    return range_of(params, find_kernel(params.shape.dim, params.shape.v_dim)->tile, KeyTiles::kOwn).end;
}

int num_key_heads(const BackwardParams& params) {
    return params.shape.batch / params.num_masks * params.shape.kv_heads;
}

BackwardLaunch staged_launch(const BackwardParams& params, int num_first_heads, int first_stage, int num_sms,
                             const uint32_t* arrived) {
    using enum KeyTiles;
    const int num_heads = num_key_heads(params);
    const bool has_more_heads = num_first_heads < num_heads;
    const BackwardStage stages[] = {{kOwn, {0, num_first_heads}, has_more_heads or has_tiles(params, kOthers)},
                                    {kOthers, {0, num_first_heads}, has_more_heads},
                                    {kAll, {num_first_heads, num_heads}, false}};
    BackwardLaunch launch{.stages = {},
                          .num_stages = static_cast<int>(std::size(stages)) - first_stage,
                          .first_counter = first_stage,
                          .num_sms = num_sms,
                          .arrived = arrived};
    std::copy(stages + first_stage, std::end(stages), launch.stages);
    return launch;
}

cudaError_t attention_backward(const BackwardParams& params, cudaStream_t stream) {
    const auto [kernel, workspace] = find_pass(params);
    cudaError_t error = prepare_attention_backward(params, stream);
    if (error == cudaSuccess)
        error = run_attention_backward(params, all_in_one_launch(params), stream);
    const ConvertedSums all{true, range_of(params, kernel.tile, KeyTiles::kAll)};
    return error == cudaSuccess ? convert_sums(params, workspace, kernel.tile, kernel.dim, kernel.v_dim, all, stream)
                                : error;
}

cudaError_t prepare_attention_backward(const BackwardParams& params, cudaStream_t stream) {
    const auto [kernel, workspace] = find_pass(params);
    return prepare_backward(params, workspace, kernel.tile, kernel.dim, stream);
}

cudaError_t run_attention_backward(const BackwardParams& params, const BackwardLaunch& launch, cudaStream_t stream) {
    const auto [kernel, workspace] = find_pass(params);
    return kernel.launch(params, launch, workspace, stream);
}

cudaError_t finish_key_gradients(const BackwardParams& params, KeyTiles tiles, cudaStream_t stream) {
    const auto [kernel, workspace] = find_pass(params);
    const ConvertedSums sums{false, range_of(params, kernel.tile, tiles)};
    return convert_sums(params, workspace, kernel.tile, kernel.dim, kernel.v_dim, sums, stream);
}

cudaError_t finish_query_gradients(const BackwardParams& params, cudaStream_t stream) {
    const auto [kernel, workspace] = find_pass(params);
    return convert_sums(params, workspace, kernel.tile, kernel.dim, kernel.v_dim, {true, {0, 0}}, stream);
}

cudaError_t preload_backward(DType dtype, int dim, int v_dim, bool soft_cap) {
    cudaError_t error = preload_prepare();
    if (error == cudaSuccess)
        error = preload_convert();
    return error == cudaSuccess ? find_kernel(dim, v_dim)->load(dtype, soft_cap) : error;
}

}  // namespace jaxmagi::sm90
