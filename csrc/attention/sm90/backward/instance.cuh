#pragma once

#include "csrc/attention/sm90/backward/kernels.h"
#include "csrc/attention/sm90/backward/launch.cuh"

namespace jaxmagi::sm90 {

// kRows, kKeys: queries of a block, keys of a tile. kQStages, kDoutStages: of shared memory.
template <int kDim, int kVDim, int kRows, int kKeys, int kConsumers, int kQStages, int kDoutStages>
struct BackwardInstance {
    // Calls function(config) with the configuration of the kernel for this type, with or without soft cap.
    template <typename Function> static cudaError_t with_config(DType dtype, bool soft_cap, const Function& function) {
        const auto with_element = [&](auto element) {
            using Element = decltype(element);
            return soft_cap ? function(BackwardConfig<Element, kDim, kVDim, kRows, kKeys, kConsumers, kQStages,
                                                      kDoutStages, true>{})
                            : function(BackwardConfig<Element, kDim, kVDim, kRows, kKeys, kConsumers, kQStages,
                                                      kDoutStages, false>{});
        };
        return dtype == DType::kBF16 ? with_element(BFloat16{}) : with_element(Float16{});
    }
    static cudaError_t load(DType dtype, bool soft_cap) {
        return with_config(dtype, soft_cap, [](auto config) { return load_backward<decltype(config)>(); });
    }
    static cudaError_t launch(const BackwardParams& params, const BackwardWorkspace& workspace, cudaStream_t stream) {
        return with_config(params.dtype, params.soft_cap > 0, [&](auto config) {
            return launch_backward<decltype(config)>(params, workspace, stream);
        });
    }
    static constexpr BackwardKernel kKernel{kDim, kVDim, {kRows, kKeys}, load, launch};
};

}  // namespace jaxmagi::sm90
