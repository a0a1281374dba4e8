#pragma once

#include "csrc/attention/sm90/backward/workspace.h"

// The kernels that run before and after the backward kernel.

namespace jaxmagi::sm90 {

// Fills the workspace with the zeros that it begins with, the row statistics, the positions of tiles in the tile
// schedule and, for a fixed order of sums, the bands of each block of queries.
cudaError_t prepare_backward(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                             int kernel_dim, cudaStream_t stream);

// Which sums are converted, in one launch: of queries, and of keys of some tiles.
struct ConvertedSums {
    bool queries;
    Range key_tiles;
};

// Writes dq from the sums in the workspace, and dk and dv where these are sums too. kernel_dim, kernel_v_dim, tile: of
// the kernel.
cudaError_t convert_sums(const BackwardParams& params, const BackwardWorkspace& workspace, TileShape tile,
                         int kernel_dim, int kernel_v_dim, const ConvertedSums& sums, cudaStream_t stream);

// Load the kernels; not allowed while a stream is captured.
cudaError_t preload_prepare();
cudaError_t preload_convert();

}  // namespace jaxmagi::sm90
