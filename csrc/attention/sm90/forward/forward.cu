#include "csrc/attention/sm90/forward/forward.h"

#include "csrc/attention/sm90/dispatch.cuh"
#include "csrc/attention/sm90/forward/kernels.h"

namespace jaxmagi::sm90 {
namespace {

// Returns the smallest kernel that holds both dimensions, or nullptr.
const ForwardKernel* find_kernel(int dim, int v_dim) {
    return smallest_kernel<ForwardKernel>(
        {&kForwardD64, &kForwardD96, &kForwardD128, &kForwardD192V128, &kForwardD192, &kForwardD256}, dim, v_dim);
}

}  // namespace

std::optional<TileShape> forward_tile(int dim, int v_dim) {
    const ForwardKernel* kernel = find_kernel(dim, v_dim);
    return kernel != nullptr ? std::optional(kernel->tile) : std::nullopt;
}

cudaError_t attention_forward(const ForwardParams& params, cudaStream_t stream) {
    return find_kernel(params.dim, params.v_dim)->launch(params, 0, stream);
}

cudaError_t help_attention_forward(const ForwardParams& params, int num_sms, cudaStream_t stream) {
    return num_sms > 0 ? find_kernel(params.dim, params.v_dim)->launch(params, num_sms, stream) : cudaSuccess;
}

cudaError_t preload_forward(DType dtype, int dim, int v_dim, bool soft_cap) {
    return find_kernel(dim, v_dim)->load(dtype, soft_cap);
}

}  // namespace jaxmagi::sm90
