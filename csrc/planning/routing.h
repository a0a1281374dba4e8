#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"
#include "csrc/planning/owners.h"
#include "csrc/planning/runs.h"
#include "csrc/planning/shard.h"
#include "csrc/planning/transfers.h"

namespace jaxmagi::planning {

class Staging;

// The rows that each rank of a layout has, and the keys that it needs.
class Routing {
public:
    // `token_order` holds the ranks' tokens one after the other, -1 for padding. `bands` are tight.
    Routing(const std::vector<Band>& bands, std::span<const int32_t> token_order, int num_ranks);

    int num_ranks() const { return static_cast<int>(shards_.size()); }

private:
    friend class Staging;

    int shard_length_;
    Owners owners_;
    std::vector<Shard> shards_;
};

// The keys of each attention call of each rank. A single call sees the rank's own keys and the received ones; of
// several, the first sees the own keys and each later one a part of the received keys. Refers to the routing.
class Staging {
public:
    // `shares` has a share of a rank's cells with received keys for each transfer. There is one transfer less than
    // stages, but one for a single stage. Received keys are cut in their order, or by owner.
    Staging(const Routing& routing, int num_stages, std::span<const int32_t> shares, bool is_by_owner);

    int num_ranks() const { return routing_.num_ranks(); }
    int num_stages() const { return num_stages_; }
    int num_transfers() const { return num_stages_ > 1 ? num_stages_ - 1 : 1; }

    // Returns the rows that move, by rank, then transfer. Consecutive ranks share a host.
    std::vector<Traffic> traffic(int ranks_per_host) const;
    // Returns the most rows that a rank receives in one transfer.
    int64_t most_received() const;

    std::vector<Band> bands(int rank, int stage) const;
    TransferTables transfer_tables(int index) const;

private:
    Runs keys(int rank, int stage) const;
    std::vector<const Runs*> parts(int transfer) const;

    const Routing& routing_;
    const int num_stages_;
    std::vector<std::vector<Runs>> received_;  // by rank, then transfer
};

}  // namespace jaxmagi::planning
