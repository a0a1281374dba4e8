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

std::vector<const Runs*> Routing::received() const {
    std::vector<const Runs*> received;
    for (const Shard& shard : shards_)
        received.push_back(&shard.remote);
    return received;
}

std::vector<Traffic> Routing::traffic(int ranks_per_host) const {
    return count_traffic(owners_, received(), ranks_per_host);
}

int64_t Routing::most_received() const {
    int64_t most = 0;
    for (const Shard& shard : shards_)
        most = std::max(most, num_rows(shard.remote));
    return most;
}

std::vector<Band> Routing::bands(int rank) const {
    return local_bands(shards_[rank], shard_length_);
}

TransferTables Routing::transfer_tables() const {
    return planning::transfer_tables(owners_, received());
}

}  // namespace jaxmagi::planning
