#include "csrc/planning/transfers.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace jaxmagi::planning {
namespace {

// Visits the copies of all ranks, by destination.
template <typename Visit>
void for_each_copy(const Owners& owners, const std::vector<const Runs*>& received, Visit visit) {
    for (int destination = 0; destination < static_cast<int>(received.size()); ++destination)
        for (const Run& wanted : *received[destination]) {
            for (const Run& run : meeting(owners.runs, {wanted.begin, wanted.end})) {
                const int begin = std::max(run.begin, wanted.begin), end = std::min(run.end, wanted.end);
                visit(RowCopy{.source = owners.ranks[owners.index_of(run)],
                           .destination = destination,
                           .row = run.place + begin - run.begin,
                           .destination_row = wanted.place + begin - wanted.begin,
                           .length = end - begin});
            }
        }
}

std::vector<SentRange> place_sends(std::vector<RowCopy> copies) {
    std::ranges::stable_sort(copies, {}, [](const RowCopy& copy) { return std::tuple(copy.source, copy.destination); });
    std::vector<SentRange> sends;
    for (const auto& [source, destination, row, destination_row, length] : copies) {
        const bool is_same_pair =
            not sends.empty() and sends.back().rank == source and sends.back().peer == destination;
        if (is_same_pair and sends.back().row + sends.back().length == row and
            sends.back().peer_row + sends.back().length == destination_row) {
            sends.back().length += length;
            continue;
        }
        const int slot = is_same_pair ? sends.back().slot + sends.back().length : 0;
        sends.push_back({source, destination, slot, row, length, destination_row});
    }
    return sends;
}

std::vector<ReceivedRange> receives_of(const std::vector<SentRange>& sends) {
    std::vector<ReceivedRange> receives;
    for (const SentRange& send : sends)
        receives.push_back({send.peer, send.rank, send.slot, send.peer_row, send.length});
    std::ranges::stable_sort(receives, {}, [](const ReceivedRange& each) { return std::tuple(each.rank, each.row); });
    return receives;
}

}  // namespace

TransferTables place_copies(std::vector<RowCopy> copies) {
    TransferTables transfer{.sends = place_sends(std::move(copies)), .receives = {}};
    transfer.receives = receives_of(transfer.sends);
    return transfer;
}

TransferTables transfer_tables(const Owners& owners, const std::vector<const Runs*>& received) {
    std::vector<RowCopy> copies;
    for_each_copy(owners, received, [&](const RowCopy& copy) { copies.push_back(copy); });
    return place_copies(std::move(copies));
}

std::vector<Traffic> count_traffic(const Owners& owners, const std::vector<const Runs*>& received, int ranks_per_host) {
    std::vector<Traffic> traffic(received.size());
    for_each_copy(owners, received, [&](const RowCopy& copy) {
        Traffic &source = traffic[copy.source], &destination = traffic[copy.destination];
        const bool is_within = copy.source / ranks_per_host == copy.destination / ranks_per_host;
        (is_within ? source.sent_within : source.sent_between) += copy.length;
        (is_within ? destination.received_within : destination.received_between) += copy.length;
    });
    return traffic;
}

}  // namespace jaxmagi::planning
