#include "csrc/collectives/control_block.h"
#include "csrc/overlap/sm90/launch.cuh"
#include "csrc/overlap/sm90/row_blocks.cuh"

namespace jaxmagi::overlap {
namespace {

constexpr size_t kAlignment = 1024;  // of the data
constexpr int kMostRanks = collectives::kMaxNativeRanks;

ReceivedLayout layout_of(int64_t num_flags, int64_t data_bytes) {
    const size_t failure = kMostRanks * sizeof(uint64_t), flags = failure + sizeof(uint32_t);
    const size_t data = round_up(flags + num_flags * sizeof(uint32_t), kAlignment);
    return {.failure = failure,
            .flags = flags,
            .data = data,
            .bytes = data + static_cast<size_t>(data_bytes),
            .num_flags = num_flags};
}

}  // namespace

ReceivedLayout received_layout(Collective collective, const ProductShape& shape) {
    using Config = GemmConfig<Collective::kReduceScatter, BFloat16, false>;
    const int64_t others = shape.ranks - 1;
    if (collective == Collective::kReduceScatter) {
        const int64_t parts = others * rounds_of(shape) * kClusterCtas * Config::kConsumers;
        return layout_of(parts, parts * kPanels * Config::kPanelBytes);
    }
    const RowBlocks blocks(shape);
    return layout_of(others * shape.examples * blocks.in_example,
                     others * shape.examples * shape.rows * blocks.row_bytes);
}

cudaError_t preload(Collective collective, OperandType type, bool transposed_w) {
    return (collective == Collective::kReduceScatter ? preload_reduce_scatter : preload_all_gather)(type, transposed_w);
}

}  // namespace jaxmagi::overlap
