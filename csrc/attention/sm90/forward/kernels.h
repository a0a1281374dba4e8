#pragma once

#include "csrc/attention/sm90/forward/forward.h"

// The kernels that exist, one source file each. Their tiles are the fastest that were measured among those that
// registers and shared memory allow.

namespace jaxmagi::sm90 {

struct ForwardKernel {
    int dim, v_dim;
    TileShape tile;
    cudaError_t (*load)(DType dtype, bool soft_cap);
    // num_helpers: 0 for the call itself; otherwise SMs that help it.
    cudaError_t (*launch)(const ForwardParams& params, int num_helpers, cudaStream_t stream);
};

extern const ForwardKernel kForwardD64, kForwardD96, kForwardD128, kForwardD192V128, kForwardD192, kForwardD256;

}  // namespace jaxmagi::sm90
