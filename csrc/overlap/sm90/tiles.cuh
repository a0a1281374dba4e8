#pragma once

#include "csrc/overlap/sm90/config.cuh"

// The order of tiles. There are the same tiles of the rows of each rank, which are counted alike on all ranks.
//   reduce-scatter  A round has the tiles of one number for all ranks: first for the others, beginning with the next
//                   one, and behind these the rank's own tile of some rounds before, so that what it adds up has come
//                   by then. So tiles travel all the while.
//   all-gather      The rank's own tiles, then those of the rank before, whose rows arrive first, and so on.
//
// Clusters claim tiles in this order. A tile waits only for tiles of other ranks that are before it in their orders, or
// for rows, which the clusters that begin first push before they compute. So ranks never wait for each other in a
// circle, as long as one cluster of each runs: other kernels, which may wait for ranks themselves, can hold the rest.
// A product holds multiprocessors before all ranks have come to it, so a rank must be able to come without another
// kernel of this one.

namespace jaxmagi::overlap {

// Pairs of row tiles that clusters go through before the next tile of columns.
inline constexpr int kGroupPairs = 8;

struct TileNumbers {
    int pairs, column_tiles;  // of an example

    JAXMAGI_HOST_DEVICE explicit TileNumbers(const ProductShape& shape)
        : pairs(ceil_div(shape.rows, kPairRows)), column_tiles(ceil_div(shape.columns, kTileColumns)) {}

    JAXMAGI_HOST_DEVICE int in_example() const { return pairs * column_tiles; }
};

// A pair of tiles of the rows of a rank, with the first row and the first column.
struct TilePlace {
    int rank, number, example, row, column;
};

// Returns the place of a rank among the others of another one.
__device__ __forceinline__ int among_others(int rank, int of) {
    return rank - (rank > of);
}

template <Collective kCollective> struct TileOrder {
    const GemmArguments& arguments;
    TileNumbers numbers;
    int rounds;

    __device__ __forceinline__ explicit TileOrder(const GemmArguments& given)
        : arguments(given), numbers(given.shape), rounds(given.shape.examples * numbers.in_example()) {}

    __device__ __forceinline__ bool has(int position) const { return position < rounds * arguments.shape.ranks; }

    __device__ __forceinline__ TilePlace at(int position) const {
        const int ranks = arguments.shape.ranks, rank = arguments.shape.rank, lag = arguments.lag;
        if constexpr (kCollective == Collective::kAllGather)
            return place((rank + ranks - position / rounds) % ranks, position % rounds);
        const int first = lag * (ranks - 1), middle = (rounds - lag) * ranks;
        if (position < first)
            return place((rank + 1 + position % (ranks - 1)) % ranks, position / (ranks - 1));
        if (position >= first + middle)
            return place(rank, position - first - middle + rounds - lag);
        const int round = (position - first) / ranks, turn = (position - first) % ranks;
        return turn == ranks - 1 ? place(rank, round) : place((rank + 1 + turn) % ranks, round + lag);
    }

private:
    __device__ __forceinline__ TilePlace place(int of_rank, int number) const {
        const int example = number / numbers.in_example(), tile = number % numbers.in_example();
        const int in_group = kGroupPairs * numbers.column_tiles, group = tile / in_group, rest = tile % in_group;
        const int height = min(kGroupPairs, numbers.pairs - group * kGroupPairs);
        return {.rank = of_rank,
                .number = number,
                .example = example,
                .row = (group * kGroupPairs + rest % height) * kPairRows,
                .column = rest / height * kTileColumns};
    }
};

}  // namespace jaxmagi::overlap
