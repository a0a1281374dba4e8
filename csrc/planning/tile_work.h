#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/first_deal.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// How a kernel works through a mask; see csrc/mask/tile_count.h.
struct TiledPass {
    int rows, keys;
    bool by_keys;
    double partial_cost;  // of a tile with invisible cells, in tiles without
};

// What ranks compute, in tiles.
class TileWork {
public:
    TileWork(std::span<const WeightedMask> masks, const Units& units, std::span<const TiledPass> passes)
        : masks_(masks), units_(units), passes_(passes) {}

    // Of one attention call over all keys of a rank with these units: for each pass.
    std::vector<double> of(std::span<const int> members) const;
    // How long that takes: the parts of bands that these units see.
    int64_t num_pieces(std::span<const int> members) const;

private:
    std::span<const WeightedMask> masks_;
    const Units& units_;
    std::span<const TiledPass> passes_;
};

// The work of each rank over the mean of a deal: the larger share of those of the passes; 0 without any.
class TileShares {
public:
    TileShares(const Deal& deal, const TileWork& work);

    double operator[](int rank) const { return shares_[rank]; }
    double& operator[](int rank) { return shares_[rank]; }
    double largest() const;
    // Of a rank that had these units, if the mean stayed.
    double of(std::span<const int> members) const { return share(work_.of(members)); }

private:
    double share(std::span<const double> work) const;

    const TileWork& work_;
    std::vector<double> means_, shares_;
};

}  // namespace jaxmagi::planning
