// This file is compiled once per instruction set, as isa.h explains.

#include "csrc/attention/cpu/backward_tile.h"
#include "csrc/attention/cpu/forward_tile.h"

namespace jaxmagi::cpu::JAXMAGI_ISA {
namespace {

template <typename T> void zero_dq(const BackwardParams& params, int64_t batch, int64_t head, Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
        zero_row<T>(params.dq, {batch, row, head});
}

template <typename T>
constexpr KernelTable kKernels = {
    .forward_workspace_bytes = ForwardWorkspace<T>::bytes,
    .forward_tile = [](const ForwardTile& tile, void* workspace) { ForwardTileKernel<T>(tile, workspace).run(); },
    .backward_workspace_bytes = BackwardWorkspace<T>::bytes,
    .load_chunk = [](const KeyChunk& chunk, void* workspace) { KeyChunkKernel<T>(chunk, workspace).load(); },
    .backward_tile = [](const BackwardTile& tile, void* workspace) { BackwardTileKernel<T>(tile, workspace).run(); },
    .add_dq = [](const BackwardTile& tile, DqAccumulator dq,
                 void* workspace) { BackwardTileKernel<T>(tile, workspace).add_dq(dq); },
    .store_chunk = [](const KeyChunk& chunk, void* workspace) { KeyChunkKernel<T>(chunk, workspace).store(); },
    .zero_dq = zero_dq<T>,
};

}  // namespace

extern const KernelTable kFloatKernels = kKernels<float>;
extern const KernelTable kDoubleKernels = kKernels<double>;

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
