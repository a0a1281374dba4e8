#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/first_assignment.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// The tiles of a kernel, as in csrc/mask/tile_count.h.
struct TiledPass {
    int rows, keys;
    bool by_keys;
    double partial_cost;  // time of a tile with invisible cells, in times of one without
};

// Counts what ranks compute, in tiles.
class TileWork {
public:
    TileWork(std::span<const WeightedMask> masks, const Units& units, std::span<const TiledPass> passes)
        : masks_(masks), units_(units), passes_(passes) {}

    // Returns the work of a single attention call over all keys of a rank with these units, for each pass.
    std::vector<double> of(std::span<const int> members) const;
    // Returns the number of pieces of bands in these units, which the time of of() grows with.
    int64_t num_pieces(std::span<const int> members) const;

private:
    std::span<const WeightedMask> masks_;
    const Units& units_;
    std::span<const TiledPass> passes_;
};

// The work of each rank over the mean of an assignment, in the pass in which that is larger; 0 without any work.
class TileShares {
public:
    TileShares(const Assignment& assignment, const TileWork& work);

    double operator[](int rank) const { return shares_[rank]; }
    double& operator[](int rank) { return shares_[rank]; }
    double largest() const;
    // Returns the share of a rank that had these units, if the mean stayed.
    double of(std::span<const int> members) const { return share(work_.of(members)); }

private:
    double share(std::span<const double> work) const;

    const TileWork& work_;
    std::vector<double> means_, shares_;
};

}  // namespace jaxmagi::planning
