#pragma once

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/attention/sm90/backward/workspace.h"

// The kernels that exist, one source file each.

namespace jaxmagi::sm90 {

struct BackwardKernel {
    int dim, v_dim;
    TileShape tile;
    cudaError_t (*load)(DType dtype, bool soft_cap);
    cudaError_t (*launch)(const BackwardParams& params, const BackwardLaunch& launch,
                          const BackwardWorkspace& workspace, cudaStream_t stream);
};

extern const BackwardKernel kBackwardD64, kBackwardD96, kBackwardD128, kBackwardD192V128, kBackwardD192, kBackwardD256;

}  // namespace jaxmagi::sm90
