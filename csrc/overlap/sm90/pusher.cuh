#pragma once

#include "csrc/common/sm90/bulk.cuh"
#include "csrc/overlap/sm90/row_blocks.cuh"
#include "csrc/overlap/sm90/tiles.cuh"

namespace jaxmagi::overlap {

struct Piece {
    const char* from;
    char* to;
    int bytes;
    uint32_t* flag;
};

// The pieces of all blocks for one rank after the other.
struct PieceOrder {
    const GemmArguments& arguments;
    RowBlocks blocks;
    int per_block, per_example, count;

    __device__ __forceinline__ explicit PieceOrder(const GemmArguments& given)
        : arguments(given),
          blocks(given.shape),
          per_block(blocks.pieces(0)),
          per_example((blocks.in_example - 1) * per_block + blocks.pieces(blocks.in_example - 1)),
          count((given.shape.ranks - 1) * given.shape.examples * per_example) {}

    __device__ __forceinline__ Piece at(int index) const {
        const ProductShape& shape = arguments.shape;
        const int of_rank = shape.examples * per_example, rest = index % per_example;
        const int to = (shape.rank + 1 + index / of_rank) % shape.ranks, example = index % of_rank / per_example;
        const int block = rest / per_block;
        const int64_t offset = static_cast<int64_t>(rest - block * per_block) * kPieceBytes;
        const int64_t row_bytes = blocks.row_bytes, first_row = block * kPairRows;
        const int64_t part = int64_t{among_others(shape.rank, to)} * shape.examples + example;
        const char* const x = static_cast<const char*>(arguments.x);
        char* const received = reinterpret_cast<char* const*>(arguments.received)[to];
        return {x + (int64_t{example} * shape.rows + first_row) * row_bytes + offset,
                received + arguments.layout.data + (part * shape.rows + first_row) * row_bytes + offset,
                static_cast<int>(min(blocks.bytes(block) - offset, int64_t{kPieceBytes})),
                reinterpret_cast<uint32_t*>(received + arguments.layout.flags) + part * blocks.in_example + block};
    }
};

// Pushes the rank's rows to all others, beginning with the next rank, and counts what has arrived in their flags. The
// clusters that begin first do this, whichever they are, before they compute: so rows travel as soon as a rank has one
// cluster, and no multiprocessor has to be left to them. The producer's thread does it; rows pass through the memory of
// stages.
template <typename Config> struct RowPusher {
    static constexpr int kMostPushers = 8;  // clusters, since neither CTA of one computes before both have pushed

    GemmMemory<Config> memory;
    const GemmArguments& arguments;

    __device__ __forceinline__ void run() const {
        if (cluster_rank() == 0) {
            const int begun = atomicAdd(&arguments.counts->begun, 1);
            for (int cta = 0; cta < kClusterCtas; ++cta)
                store_and_arrive_at(memory.begun_before(), begun, memory.begun(), cta);
        }
        wait_in_cluster(memory.begun(), 0);
        int begun;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(begun) : "r"(memory.begun_before()) : "memory");
        if (begun < kMostPushers) {
            wait_for_addresses();
            push();
        }
        // The other CTA loads weights into this one's stages.
        for (int cta = 0; cta < kClusterCtas; ++cta)
            arrive_at(memory.pushed(), cta);
        memory.pushed().wait(0);
    }

private:
    __device__ __forceinline__ int claim() const { return atomicAdd(&arguments.counts->pushed, 1); }

    // Two pieces are loaded ahead, and one is stored while the one before arrives.
    __device__ __forceinline__ void push() const {
        const PieceOrder order(arguments);
        int before = 0, now = claim(), next = claim(), turn = 0;
        load(order, now, 0);
        load(order, next, 1);
#pragma unroll 1
        for (; now < order.count; ++turn) {
            const int after = claim();
            const Piece piece = order.at(now);
            memory.piece_loaded(turn).wait(turn / Config::kPushBuffers % 2);
            bulk_store(piece.to, memory.piece(turn), piece.bytes);
            bulk_commit();
            bulk_wait<1>();
            if (turn > 0)
                signal(order, before);
            load(order, after, turn + 2);  // where the piece before was
            before = now;
            now = next;
            next = after;
        }
        bulk_wait();
        if (turn > 0)
            signal(order, before);
    }

    __device__ __forceinline__ void load(const PieceOrder& order, int index, int turn) const {
        if (index >= order.count)
            return;
        const Piece piece = order.at(index);
        memory.piece_loaded(turn).arrive_and_expect(piece.bytes);
        bulk_load(memory.piece(turn), piece.from, piece.bytes, memory.piece_loaded(turn));
    }

    static __device__ __forceinline__ void signal(const PieceOrder& order, int index) {
        fence_global_for_async();
        add_release(order.at(index).flag, 1);
    }
};

}  // namespace jaxmagi::overlap
