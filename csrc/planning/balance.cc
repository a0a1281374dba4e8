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

// Groups of a rank, chosen by trial: fewer make areas less equal, and the time of a search grows with the square.
constexpr int kFewestGroups = 8, kMostGroups = 16;
constexpr int kFewToHalve = 256;                  // units whose halves take little time to search (chosen by trial)
constexpr int64_t kMostCells = int64_t{1} << 60;  // limit of a time in cells: sums of a few still fit into 64 bits

// Returns how many of a rank's chunks form a group: as few as leave 8 to 16 groups, or 1.
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

// Returns the next smaller size of a unit, in rows, or 0 if there is none.
int smaller_unit(int unit, int chunk, int least_chunk) {
    if (unit > chunk)
        return unit / smallest_factor(unit / chunk);
    return unit % 2 == 0 and unit / 2 >= least_chunk ? unit / 2 : 0;
}

struct SizedAssignment {
    Assignment assignment;
    int unit;  // rows of a unit
};

SizedAssignment assign_units(std::span<const WeightedMask> masks, int length, int num_ranks, int shard,
                             ChunkSizes chunks, int64_t cells_per_row, std::span<const TiledPass> passes) {
    SizedAssignment best;
    int64_t received = INT64_MAX, time = INT64_MAX;  // of `best`; INT64_MAX rows if it is not balanced
    int unit = chunks.usual * group_size(shard / chunks.usual);
    for (bool is_first = true;; is_first = false) {
        const int next = smaller_unit(unit, chunks.usual, chunks.least);
        const Units units(masks, length, unit, shard / unit * num_ranks);
        Balancer balancer(units, num_ranks, cells_per_row);
        if (next == 0 or balancer.can_balance()) {
            Assignment assignment = balancer.solve();
            if (balancer.is_balanced())
                assignment = balancer.even_tiles(assignment, TileWork(masks, units, passes));
            const bool is_balanced = balancer.is_balanced();
            if (received == INT64_MAX or (is_balanced and balancer.received() < received)) {
                best = {.assignment = std::move(assignment), .unit = unit};
                received = is_balanced ? balancer.received() : INT64_MAX;
                time = balancer.time();
            }
            const bool is_once_more = is_first and balancer.is_nearly_balanced() and
                                      (unit > chunks.usual or units.count() <= kFewToHalve);
            if (next == 0 or (is_balanced and not is_once_more)) {
                if (Assignment runs = balancer.shorter_runs(time); not runs.empty())
                    best = {.assignment = std::move(runs), .unit = unit};
                return best;
            }
        }
        unit = next;
    }
}

int64_t area_of(const WeightedMask& mask) {
    return std::transform_reduce(mask.bands.begin(), mask.bands.end(), int64_t{0}, std::plus{}, area);
}

// Returns the cells that take as long as a row, counted for all layers of the mask with the largest area. It is limited
// so that the time of `most_rows` rows stays below kMostCells.
int64_t cells_per_row_of_layers(std::span<const WeightedMask> masks, int64_t cells_per_row, int64_t most_rows) {
    const int64_t layers = std::ranges::max_element(masks, {}, area_of)->weight, most = kMostCells / most_rows;
    return cells_per_row > most / layers ? most : cells_per_row * layers;
}

}  // namespace

std::vector<int> balanced_owners(std::span<const WeightedMask> masks, int length, int num_ranks, ChunkSizes chunks,
                                 int64_t cells_per_row, std::span<const TiledPass> passes) {
    const int shard = std::max(1, ceil_div(ceil_div(length, chunks.usual), num_ranks)) * chunks.usual;
    const int64_t most_rows = length + int64_t{num_ranks} * chunks.usual;
    cells_per_row = cells_per_row_of_layers(masks, cells_per_row, most_rows);
    const auto [assignment, unit] = assign_units(masks, length, num_ranks, shard, chunks, cells_per_row, passes);
    const int chunk = std::min(unit, chunks.usual), group = unit / chunk;
    std::vector<int> owners(static_cast<size_t>(shard / chunk) * num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank)
        for (const int member : assignment[rank])
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
