#pragma once

#include "csrc/overlap/sm90/config.cuh"

// The order of tiles. Each rank gets the same tiles of its rows, which are counted alike on all ranks. A round has the
// tiles of one number for all ranks: first for the others, beginning with the next one, and behind these the rank's own
// tile of some rounds before, so that what it adds up has come by then. So rows travel all the while.
//
// Clusters claim tiles in this order, and a tile waits only for tiles of other ranks that are before it in their orders.
// So ranks never wait for each other, however many clusters run at a time: other kernels, which may wait for other ranks
// themselves, can hold any multiprocessor.

namespace jaxmagi::overlap {

// Pairs of row tiles that clusters go through before the next tile of columns.
inline constexpr int kGroupPairs = 8;

struct TileNumbers {
    int pairs, column_tiles;  // of an example

    JAXMAGI_HOST_DEVICE explicit TileNumbers(const ReduceScatterShape& shape)
        : pairs(ceil_div(shape.rows, kPairRows)), column_tiles(ceil_div(shape.columns, kTileColumns)) {}

    JAXMAGI_HOST_DEVICE int in_example() const { return pairs * column_tiles; }
};

// A pair of tiles for a rank, with the first row of it and the first column.
struct TilePlace {
    int to, number, example, row, column;
};

struct TileOrder {
    const GemmArguments& arguments;
    TileNumbers numbers;
    int rounds;

    __device__ __forceinline__ explicit TileOrder(const GemmArguments& given)
        : arguments(given), numbers(given.shape), rounds(given.shape.examples * numbers.in_example()) {}

    __device__ __forceinline__ bool has(int position) const { return position < rounds * arguments.shape.ranks; }

    __device__ __forceinline__ TilePlace at(int position) const {
        const int ranks = arguments.shape.ranks, rank = arguments.shape.rank, lag = arguments.lag;
        const int first = lag * (ranks - 1), middle = (rounds - lag) * ranks;
        if (position < first)
            return place((rank + 1 + position % (ranks - 1)) % ranks, position / (ranks - 1));
        if (position >= first + middle)
            return place(rank, position - first - middle + rounds - lag);
        const int round = (position - first) / ranks, turn = (position - first) % ranks;
        return turn == ranks - 1 ? place(rank, round) : place((rank + 1 + turn) % ranks, round + lag);
    }

private:
    __device__ __forceinline__ TilePlace place(int to, int number) const {
        const int example = number / numbers.in_example(), tile = number % numbers.in_example();
        const int in_group = kGroupPairs * numbers.column_tiles, group = tile / in_group, rest = tile % in_group;
        const int height = min(kGroupPairs, numbers.pairs - group * kGroupPairs);
        return {.to = to,
                .number = number,
                .example = example,
                .row = (group * kGroupPairs + rest % height) * kPairRows,
                .column = rest / height * kTileColumns};
    }
};

}  // namespace jaxmagi::overlap
