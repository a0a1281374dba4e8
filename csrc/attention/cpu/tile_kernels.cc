// Compiled once per instruction set, see isa.h.

#include "csrc/attention/cpu/backward_tile.h"
#include "csrc/attention/cpu/forward_tile.h"

namespace jaxmagi::cpu::JAXMAGI_ISA {
namespace {

template <typename T> void forward_tile(const ForwardTile& tile, void* workspace) {
    ForwardTileKernel<T>(tile, workspace).run();
}

template <typename T> void load_chunk(const KeyChunk& chunk, void* workspace) {
    KeyChunkKernel<T>(chunk, workspace).load_chunk();
}

template <typename T> void visit_tile(const BackwardTile& tile, void* workspace) {
    BackwardTileKernel<T>(tile, workspace).visit();
}

template <typename T> void add_query_grad(const BackwardTile& tile, QueryGrad grad, void* workspace) {
    BackwardTileKernel<T>(tile, workspace).add_query_grad(grad);
}

template <typename T> void store_chunk(const KeyChunk& chunk, void* workspace) {
    KeyChunkKernel<T>(chunk, workspace).store_chunk();
}

template <typename T> void clear_query_grad(const BackwardParams& params, int64_t batch, int64_t head, Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
        clear_row<T>(params.dq, {batch, row, head});
}

template <typename T>
constexpr KernelTable kKernels = {
    .forward_workspace_bytes = ForwardWorkspace<T>::bytes,
    .forward_tile = forward_tile<T>,
    .backward_workspace_bytes = BackwardWorkspace<T>::bytes,
    .load_chunk = load_chunk<T>,
    .visit_tile = visit_tile<T>,
    .add_query_grad = add_query_grad<T>,
    .store_chunk = store_chunk<T>,
    .clear_query_grad = clear_query_grad<T>,
};

}  // namespace

extern const KernelTable kFloatKernels = kKernels<float>;
extern const KernelTable kDoubleKernels = kKernels<double>;

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
