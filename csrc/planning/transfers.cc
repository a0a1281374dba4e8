#include "csrc/planning/transfers.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace jaxmagi::planning {
namespace {

// Calls visit(source rank, source row, destination rank, destination row, length) for every copy, by destination.
template <typename Visit>
void for_each_copy(const Owners& owners, const std::vector<const Runs*>& received, Visit visit) {
    for (int destination = 0; destination < static_cast<int>(received.size()); ++destination)
        for (const Run& wanted : *received[destination]) {
            for (const Run& run : meeting(owners.runs, {wanted.begin, wanted.end})) {
                const int begin = std::max(run.begin, wanted.begin), end = std::min(run.end, wanted.end);
                visit(owners.ranks[owners.index_of(run)], run.place + begin - run.begin, destination,
                      wanted.place + begin - wanted.begin, end - begin);
            }
        }
}

}  // namespace

std::vector<PlacedCopy> place_copies(std::vector<Copy> copies, CopyOrder order) {
    std::erase_if(copies, [](const Copy& copy) { return copy.length == 0; });
    std::ranges::stable_sort(copies, {}, [](const Copy& copy) { return std::tuple(copy.rank, copy.peer); });
    std::vector<PlacedCopy> placed;
    for (const Copy& copy : copies) {
        const bool is_same_pair =
            not placed.empty() and placed.back().rank == copy.rank and placed.back().peer == copy.peer;
        if (is_same_pair and placed.back().row + placed.back().length == copy.row) {
            placed.back().length += copy.length;
            continue;
        }
        const int slot = is_same_pair ? placed.back().slot + placed.back().length : 0;
        placed.push_back({copy.rank, copy.peer, slot, copy.row, copy.length});
    }
    if (order == CopyOrder::kByRow)
        std::ranges::stable_sort(placed, {}, [](const PlacedCopy& copy) { return std::tuple(copy.rank, copy.row); });
    return placed;
}

Transfer transfer_tables(const Owners& owners, const std::vector<const Runs*>& received) {
    std::vector<Copy> sends, receives;
    for_each_copy(owners, received, [&](int source, int source_row, int destination, int row, int length) {
        sends.push_back({source, destination, source_row, length});
        receives.push_back({destination, source, row, length});
    });
    return {place_copies(std::move(sends), CopyOrder::kBySlot), place_copies(std::move(receives), CopyOrder::kByRow)};
}

std::vector<Traffic> count_traffic(const Owners& owners, const std::vector<const Runs*>& received, int ranks_per_host) {
    std::vector<Traffic> traffic(received.size());
    for_each_copy(owners, received, [&](int source, int, int destination, int, int length) {
        const bool is_within = source / ranks_per_host == destination / ranks_per_host;
        (is_within ? traffic[source].sent_within : traffic[source].sent_between) += length;
        (is_within ? traffic[destination].received_within : traffic[destination].received_between) += length;
    });
    return traffic;
}

}  // namespace jaxmagi::planning
