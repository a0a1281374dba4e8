#include "csrc/planning/routing.h"

#include <algorithm>
#include <utility>

namespace jaxmagi::planning {

Routing::Routing(const std::vector<Band>& bands, std::span<const int32_t> token_order, int num_ranks)
    : shard_length_(static_cast<int>(token_order.size() / num_ranks)) {
    std::vector<Runs> rows;
    for (int rank = 0; rank < num_ranks; ++rank)
        rows.push_back(runs_of_tokens(token_order.subspan(size_t(rank) * shard_length_, shard_length_)));
    owners_ = owners_of(rows);
    shards_ = make_shards(bands, std::move(rows), owners_);
}

Staging::Staging(const Routing& routing, int num_stages, std::span<const int32_t> shares, bool is_by_owner)
    : routing_(routing), num_stages_(num_stages) {
    for (int rank = 0; rank < routing.num_ranks(); ++rank) {
        const Shard& shard = routing.shards_[rank];
        received_.push_back(is_by_owner
                                ? split_remote_by_owner(shard, rank, routing.num_ranks(), routing.owners_, shares)
                                : split_remote(shard, shares));
    }
}

Runs Staging::keys(int rank, int stage) const {
    const Runs& own = routing_.shards_[rank].rows;
    if (num_stages_ > 1)
        return stage == 0 ? own : received_[rank][stage - 1];
    return keys_of_one_call(own, received_[rank][0], routing_.shard_length_);
}

std::vector<const Runs*> Staging::parts(int transfer) const {
    std::vector<const Runs*> parts;
    for (const auto& received : received_)
        parts.push_back(&received[transfer]);
    return parts;
}

std::vector<Traffic> Staging::traffic(int ranks_per_host) const {
    std::vector<Traffic> traffic(received_.size() * num_transfers());
    for (int transfer = 0; transfer < num_transfers(); ++transfer) {
        const auto rows = count_traffic(routing_.owners_, parts(transfer), ranks_per_host);
        for (size_t rank = 0; rank < rows.size(); ++rank)
            traffic[rank * num_transfers() + transfer] = rows[rank];
    }
    return traffic;
}

int64_t Staging::most_received() const {
    int64_t most = 0;
    for (const auto& parts : received_)
        for (const Runs& part : parts)
            most = std::max(most, num_rows(part));
    return most;
}

std::vector<Band> Staging::bands(int rank, int stage) const {
    return local_bands(routing_.shards_[rank], keys(rank, stage));
}

TransferTables Staging::transfer_tables(int index) const {
    return planning::transfer_tables(routing_.owners_, parts(index));
}

}  // namespace jaxmagi::planning
