#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"
#include "csrc/planning/owners.h"
#include "csrc/planning/shard.h"
#include "csrc/planning/transfers.h"

namespace jaxmagi::planning {

// The rows that each rank of a layout has, and the keys that it needs: its own, and behind them those that it receives.
class Routing {
public:
    // `token_order` holds the ranks' tokens one after the other, -1 for padding. `bands` are tight.
    Routing(const std::vector<Band>& bands, std::span<const int32_t> token_order, int num_ranks);

    int num_ranks() const { return static_cast<int>(shards_.size()); }

    // Returns the rows that move, by rank. Consecutive ranks share a host.
    std::vector<Traffic> traffic(int ranks_per_host) const;
    // Returns the most rows that a rank receives.
    int64_t most_received() const;

    // Returns a rank's bands, with its rows as queries and the keys that it needs.
    std::vector<Band> bands(int rank) const;
    TransferTables transfer_tables() const;

private:
    std::vector<const Runs*> received() const;

    int shard_length_;
    Owners owners_;
    std::vector<Shard> shards_;
};

}  // namespace jaxmagi::planning
