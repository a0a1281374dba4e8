#include "csrc/planning/tile_work.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "csrc/mask/tile_count.h"
#include "csrc/planning/routing.h"

namespace jaxmagi::planning {
namespace {

// The rows of each rank, whose units lie in its shard in ascending order.
std::vector<Runs> runs_of(const Deal& deal, const Units& units) {
    std::vector<Runs> rows_of_ranks;
    for (std::vector<int> members : deal) {
        std::ranges::sort(members);
        Runs& runs = rows_of_ranks.emplace_back();
        int place = 0;
        for (const int unit : members) {
            const Range rows = units.rows(unit);
            if (is_empty(rows))
                continue;
            if (not runs.empty() and runs.back().end == rows.begin)
                runs.back().end = rows.end;
            else
                runs.push_back({rows.begin, rows.end, place});
            place += length_of(rows);
        }
    }
    return rows_of_ranks;
}

void divide_by_mean(std::vector<double>& work) {
    const double mean = std::accumulate(work.begin(), work.end(), 0.0) / static_cast<double>(work.size());
    for (double& share : work)
        share = mean > 0 ? share / mean : 1;
}

}  // namespace

std::vector<double> shares_of_tiles(std::span<const WeightedMask> masks, const Deal& deal, const Units& units,
                                    std::span<const TiledPass> passes) {
    const int num_ranks = static_cast<int>(deal.size());
    const int shard_length = length_of(units.rows(0)) * static_cast<int>(deal[0].size());
    const std::vector<Runs> rows_of_ranks = runs_of(deal, units);
    const int32_t one_transfer[] = {1};
    std::vector<std::vector<double>> work(passes.size(), std::vector<double>(num_ranks));
    for (const WeightedMask& mask : masks) {
        const Routing routing(mask.bands, rows_of_ranks, shard_length);
        const Staging one_call(routing, 1, one_transfer, false);
        for (int rank = 0; rank < num_ranks; ++rank) {
            const std::vector<Band> bands = one_call.bands(rank, 0);
            for (size_t i = 0; i < passes.size(); ++i) {
                const TiledPass& pass = passes[i];
                const TileCount tiles = count_tiles(bands, pass.rows, pass.keys, pass.by_keys);
                const auto full = static_cast<double>(tiles.full), partial = static_cast<double>(tiles.partial);
                work[i][rank] += static_cast<double>(mask.weight) * (full + pass.partial_cost * partial);
            }
        }
    }
    std::vector<double> largest(num_ranks);
    for (auto& shares : work) {
        divide_by_mean(shares);
        std::ranges::transform(largest, shares, largest.begin(), std::ranges::max);
    }
    return largest;
}

}  // namespace jaxmagi::planning
