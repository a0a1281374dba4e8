#include "csrc/planning/balance.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>

#include "csrc/common/math.h"
#include "csrc/mask/area.h"
#include "csrc/planning/balancer.h"

namespace jaxmagi::planning {
namespace {

constexpr int kFewestGroups = 8, kMostGroups = 16;
constexpr int kFewToHalve = 256;  // units, of which the halves take little time
constexpr int64_t kMostCells = int64_t{1} << 60;  // of a time in cells, so that it stays within 64 bits

// How many of a rank's chunks to deal as one: as few as leave 8 to 16 groups, or 1.
int group_size(int chunks) {
    for (int groups = kMostGroups; groups >= kFewestGroups; --groups)
        if (chunks % groups == 0)
            return chunks / groups;
    return 1;
}

int smallest_factor(int number) {
    int factor = 2;
    while (number % factor != 0)
        ++factor;
    return factor;
}

// What to deal next, smaller than units of so many rows: 0 if there is nothing.
int smaller_unit(int unit, int chunk, int least_chunk) {
    if (unit > chunk)
        return unit / smallest_factor(unit / chunk);
    return unit % 2 == 0 and unit / 2 >= least_chunk ? unit / 2 : 0;
}

// A deal of units of so many rows.
struct SizedDeal {
    Deal deal;
    int unit;
};

SizedDeal deal_units(std::span<const WeightedMask> masks, int length, int num_ranks, int shard, ChunkSizes chunks,
                     int64_t cells_per_row, std::span<const TiledPass> passes) {
    SizedDeal best;
    int64_t received = INT64_MAX, time = INT64_MAX;  // of the best: the first only if it is balanced
    int unit = chunks.usual * group_size(shard / chunks.usual);
    for (bool is_first = true;; is_first = false) {
        const int next = smaller_unit(unit, chunks.usual, chunks.least);
        const Units units(masks, length, unit, shard / unit * num_ranks);
        Balancer balancer(units, num_ranks, cells_per_row);
        if (next == 0 or balancer.can_balance()) {
            Deal deal = balancer.solve();
            if (balancer.is_balanced())
                deal = balancer.even_tiles(deal, TileWork(masks, units, passes));
            const bool is_balanced = balancer.is_balanced();
            if (received == INT64_MAX or (is_balanced and balancer.received() < received)) {
                best = {.deal = std::move(deal), .unit = unit};
                received = is_balanced ? balancer.received() : INT64_MAX;
                time = balancer.time();
            }
            const bool is_once_more = is_first and balancer.is_nearly_balanced() and
                                      (unit > chunks.usual or units.count() <= kFewToHalve);
            if (next == 0 or (is_balanced and not is_once_more)) {
                if (Deal runs = balancer.shorter_runs(time); not runs.empty())
                    best = {.deal = std::move(runs), .unit = unit};
                return best;
            }
        }
        unit = next;
    }
}

int64_t area_of(const WeightedMask& mask) {
    return std::transform_reduce(mask.bands.begin(), mask.bands.end(), int64_t{0}, std::plus{}, area);
}

// Of all layers that have the mask with the largest area, as long as ranks send and receive at most so many rows.
int64_t cells_per_row_of_layers(std::span<const WeightedMask> masks, int64_t cells_per_row, int64_t most_rows) {
    const int64_t layers = std::ranges::max_element(masks, {}, area_of)->weight, most = kMostCells / most_rows;
    return cells_per_row > most / layers ? most : cells_per_row * layers;
}

}  // namespace

std::vector<int> balanced_owners(std::span<const WeightedMask> masks, int length, int num_ranks, ChunkSizes chunks,
                                 int64_t cells_per_row, std::span<const TiledPass> passes) {
    const int shard = std::max(1, ceil_div(ceil_div(length, chunks.usual), num_ranks)) * chunks.usual;
    const int64_t most_rows = length + int64_t{num_ranks} * chunks.usual;
    const auto [deal, unit] = deal_units(masks, length, num_ranks, shard, chunks,
                                         cells_per_row_of_layers(masks, cells_per_row, most_rows), passes);
    const int chunk = std::min(unit, chunks.usual), group = unit / chunk;
    std::vector<int> owners(static_cast<size_t>(shard / chunk) * num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank)
        for (const int member : deal[rank])
            std::fill_n(owners.begin() + static_cast<int64_t>(member) * group, group, rank);
    return owners;
}

std::vector<int> token_order(std::span<const int> owners, int length, int num_ranks, int chunk) {
    const size_t shard = owners.size() / num_ranks * chunk;
    std::vector<int> tokens(owners.size() * chunk, -1);
    std::vector<size_t> next(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank)
        next[rank] = rank * shard;
    for (size_t i = 0; i < owners.size(); ++i) {
        const int64_t begin = static_cast<int64_t>(i) * chunk;
        const auto place = tokens.begin() + next[owners[i]];
        std::iota(place, place + std::clamp<int64_t>(length - begin, 0, chunk), static_cast<int>(begin));
        next[owners[i]] += chunk;
    }
    return tokens;
}

}  // namespace jaxmagi::planning
