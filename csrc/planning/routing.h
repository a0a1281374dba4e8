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

// Which rows and keys each rank of a layout has and needs.
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

// A choice of the number of attention calls of a rank. One call sees the rank's own keys and those received; of
// several, the first sees the own ones, each other a part of the received ones. Refers to the routing.
class Staging {
public:
    // One share for each transfer: of a rank's cells with received keys. There is one transfer less than stages, but
    // for one stage there is one. Received keys are cut in their order, or by owner.
    Staging(const Routing& routing, int num_stages, std::span<const int32_t> shares, bool is_by_owner);

    int num_ranks() const { return routing_.num_ranks(); }
    int num_stages() const { return num_stages_; }
    int num_transfers() const { return num_stages_ > 1 ? num_stages_ - 1 : 1; }

    // By rank, then transfer; hosts have so many ranks with consecutive numbers.
    std::vector<Traffic> traffic(int ranks_per_host) const;
    // The most rows that a rank receives in one transfer.
    int64_t most_received() const;

    // Of one rank and stage.
    std::vector<Band> bands(int rank, int stage) const;

    Transfer transfer(int index) const;

private:
    Runs keys(int rank, int stage) const;
    std::vector<const Runs*> parts(int transfer) const;

    const Routing& routing_;
    const int num_stages_;
    std::vector<std::vector<Runs>> received_;  // by rank, then transfer
};

}  // namespace jaxmagi::planning
