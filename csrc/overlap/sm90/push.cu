#include "csrc/overlap/sm90/push.h"

#include "csrc/common/sm90/bulk.cuh"
#include "csrc/overlap/sm90/row_blocks.cuh"
#include "csrc/overlap/sm90/tiles.cuh"

namespace jaxmagi::overlap {
namespace {

constexpr int kBuffers = 3, kAlignment = 128, kSharedBytes = kAlignment + kBuffers * (RowBlocks::kPieceBytes + 8);

struct Piece {
    const char* from;
    char* to;
    int bytes;
    uint32_t* flag;
};

// The pieces of all blocks for one rank after the other.
struct PieceOrder {
    const PushArguments& arguments;
    RowBlocks blocks;
    int per_block, per_example, count;

    __device__ explicit PieceOrder(const PushArguments& given)
        : arguments(given),
          blocks(given.shape),
          per_block(blocks.pieces(0)),
          per_example((blocks.in_example - 1) * per_block + blocks.pieces(blocks.in_example - 1)),
          count((given.shape.ranks - 1) * given.shape.examples * per_example) {}

    __device__ Piece at(int index) const {
        const ProductShape& shape = arguments.shape;
        const int of_rank = shape.examples * per_example, rest = index % per_example;
        const int to = (shape.rank + 1 + index / of_rank) % shape.ranks, example = index % of_rank / per_example;
        const int block = rest / per_block;
        const int64_t offset = static_cast<int64_t>(rest - block * per_block) * RowBlocks::kPieceBytes;
        const int64_t row_bytes = blocks.row_bytes, first_row = block * kPairRows;
        const int64_t part = int64_t{among_others(shape.rank, to)} * shape.examples + example;
        const char* const x = static_cast<const char*>(arguments.x);
        char* const received = reinterpret_cast<char* const*>(arguments.received)[to];
        return {x + (int64_t{example} * shape.rows + first_row) * row_bytes + offset,
                received + arguments.layout.data + (part * shape.rows + first_row) * row_bytes + offset,
                static_cast<int>(min(blocks.bytes(block) - offset, int64_t{RowBlocks::kPieceBytes})),
                reinterpret_cast<uint32_t*>(received + arguments.layout.flags) + part * blocks.in_example + block};
    }
};

// One thread of a CTA does all: two pieces are loaded ahead, and one is stored while the one before arrives.
__global__ void __launch_bounds__(32, 1) push_kernel(const __grid_constant__ PushArguments arguments) {
    extern __shared__ char raw[];
    if (threadIdx.x > 0)
        return;
    const SharedAddress base = (shared_address(raw) + kAlignment - 1) & ~(kAlignment - 1u);
    const PieceOrder order(arguments);
    const auto buffer = [&](int turn) { return base + turn % kBuffers * RowBlocks::kPieceBytes; };
    const auto loaded = [&](int turn) {
        return Mbarrier{base + kBuffers * RowBlocks::kPieceBytes + turn % kBuffers * 8};
    };
    const auto index = [](int turn) { return static_cast<int>(blockIdx.x + turn * gridDim.x); };
    const auto load = [&](int turn) {
        if (index(turn) >= order.count)
            return;
        const Piece piece = order.at(index(turn));
        loaded(turn).arrive_and_expect(piece.bytes);
        bulk_load(buffer(turn), piece.from, piece.bytes, loaded(turn));
    };
    const auto signal = [&](int turn) {
        fence_global_for_async();
        add_release(order.at(index(turn)).flag, 1);
    };
    for (int i = 0; i < kBuffers; ++i)
        loaded(i).init(1);
    fence_mbarrier_init();
    load(0);
    load(1);
    int turn = 0;
    for (; index(turn) < order.count; ++turn) {
        const Piece piece = order.at(index(turn));
        loaded(turn).wait(turn / kBuffers % 2);
        bulk_store(piece.to, buffer(turn), piece.bytes);
        bulk_commit();
        bulk_wait<1>();
        if (turn > 0)
            signal(turn - 1);
        load(turn + 2);  // where the piece before was
    }
    bulk_wait();
    if (turn > 0)
        signal(turn - 1);
}

}  // namespace

cudaError_t push_rows(const PushArguments& arguments, int num_sms, cudaStream_t stream) {
    push_kernel<<<num_sms, 32, kSharedBytes, stream>>>(arguments);
    return cudaGetLastError();
}

cudaError_t preload_push() {
    return cudaFuncSetAttribute(push_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
}

}  // namespace jaxmagi::overlap
