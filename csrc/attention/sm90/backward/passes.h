#pragma once

#include "csrc/attention/sm90/backward/workspace.h"

// What runs before and after the backward kernel.

namespace jaxmagi::sm90 {

// Fills the workspace: zeros, what is known of the rows and, where the order of sums is fixed, what it is found by.
cudaError_t prepare_backward(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                             cudaStream_t stream);

// Writes dq from the sums in the workspace.
cudaError_t convert_dq(const BackwardParams& params, const BackwardWorkspace& workspace, int kernel_dim,
                       cudaStream_t stream);

// Not to be called while a stream is captured.
cudaError_t preload_prepare();
cudaError_t preload_convert();

}  // namespace jaxmagi::sm90
