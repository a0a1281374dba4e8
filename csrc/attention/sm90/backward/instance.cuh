#pragma once

#include "csrc/attention/sm90/backward/kernels.h"
#include "csrc/attention/sm90/backward/launch.cuh"

namespace jaxmagi::sm90 {

// kRows, kKeys: queries of a block, keys of a tile. kQStages, kDoutStages: of shared memory.
template <int kDim, int kVDim, int kRows, int kKeys, int kConsumers, int kQStages, int kDoutStages>
struct BackwardInstance {
    template <typename Element, bool kSoftCap>
    using Config = BackwardConfig<Element, kDim, kVDim, kRows, kKeys, kConsumers, kQStages, kDoutStages, kSoftCap>;

    static cudaError_t load(DType dtype, bool soft_cap) {
        return with_config<Config>(dtype, soft_cap, [](auto config) { return load_backward<decltype(config)>(); });
    }
    static cudaError_t launch(const BackwardParams& params, const BackwardWorkspace& workspace, cudaStream_t stream) {
        return with_config<Config>(params.dtype, params.soft_cap > 0, [&](auto config) {
            return launch_backward<decltype(config)>(params, workspace, stream);
        });
    }
    static constexpr BackwardKernel kKernel{kDim, kVDim, {kRows, kKeys}, load, launch};
};

}  // namespace jaxmagi::sm90
