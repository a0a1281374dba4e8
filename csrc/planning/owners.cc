#include "csrc/planning/owners.h"

#include <algorithm>
#include <utility>

namespace jaxmagi::planning {

Owners owners_of(const std::vector<Runs>& rows_of_ranks) {
    std::vector<std::pair<int, int>> order;  // rank, index
    for (int rank = 0; rank < static_cast<int>(rows_of_ranks.size()); ++rank)
        for (int index = 0; index < static_cast<int>(rows_of_ranks[rank].size()); ++index)
            order.emplace_back(rank, index);
    std::ranges::sort(order, {}, [&](const auto& run) { return rows_of_ranks[run.first][run.second].begin; });
    Owners owners;
    for (const auto& [rank, index] : order) {
        owners.runs.push_back(rows_of_ranks[rank][index]);
        owners.ranks.push_back(rank);
        owners.indices.push_back(index);
    }
    return owners;
}

}  // namespace jaxmagi::planning
