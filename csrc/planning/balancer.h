#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/first_deal.h"
#include "csrc/planning/hand.h"
#include "csrc/planning/swap_search.h"
#include "csrc/planning/tile_work.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// What makes a deal better than another: less area above the limit, then a shorter time of the slowest rank, then fewer
// rows.
struct Quality {
    int64_t excess, time, received;
    auto operator<=>(const Quality&) const = default;
};

// Deals units of one size: nearly equal areas, few rows to receive.
class Balancer {
public:
    // A row that travels takes as long as so many cells; 0 if it takes no time.
    Balancer(const Units& units, int num_ranks, int64_t cells_per_row);

    // Whether areas can be as equal as they should be.
    bool can_balance() const { return most_even_ <= thousandths(allowed_ + kTolerance); }
    // Whether a few units have to leave long runs of neighbours to balance them.
    bool is_nearly_balanced() const { return is_nearly_balanced_; }

    Deal solve();
    // Goes on from a balanced deal where ranks have too many tiles for their areas: these give area to others, by
    // exchanges after which the larger of two ranks has a smaller share of the tiles.
    Deal even_tiles(const Deal& deal, const TileWork& work);

    // Of what was found.
    bool is_balanced() const { return found_.excess == 0 and can_balance(); }
    int64_t received() const { return found_.received; }
    int64_t time() const { return found_.time; }

    // Contiguous or zigzag units, if they are nearly even and take less time than that; else nothing.
    Deal shorter_runs(int64_t time) const;

private:
    static constexpr int kTolerance = 2;  // thousandths beyond the limit, if no other deal is within

    int64_t thousandths(int count) const { return mean_ / 1000 * count + mean_ % 1000 * count / 1000; }
    int64_t largest_area(const Deal& deal) const;
    int64_t accepted() const { return std::max(most_even_, thousandths(allowed_ + kTolerance)); }
    int64_t limit() const { return std::max(most_even_, thousandths(allowed_)); }
    std::vector<int64_t> for_all(int64_t area) const { return std::vector<int64_t>(num_ranks_, area); }
    const Deal* balanced_runs() const;
    std::vector<Deal> first_deals() const;
    bool can_search() const;
    Limits limits_of(const std::vector<Hand>& hands) const;
    Quality quality_of(const std::vector<Hand>& hands) const;
    Deal search(const Deal& deal, Quality& quality) const;
    std::vector<Hand> hands_of(const Deal& deal) const;

    const Units& units_;
    const int num_ranks_;
    const int64_t cells_per_row_;
    const int64_t mean_;
    const Deal contiguous_, zigzag_, lpt_;
    const int64_t by_runs_;    // the largest area of a rank in one of the first two
    const int64_t most_even_;  // in one of the three
    int allowed_;              // largest over mean area, in thousandths
    bool is_nearly_balanced_ = false;
    Quality found_{.excess = INT64_MAX, .time = INT64_MAX, .received = INT64_MAX};
};

}  // namespace jaxmagi::planning
