#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/first_assignment.h"
#include "csrc/planning/rank_chunks.h"
#include "csrc/planning/swap_search.h"
#include "csrc/planning/tile_work.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// The smaller of two qualities is the better one: less area above the limit, then a shorter time of the slowest rank,
// then fewer rows.
struct Quality {
    int64_t excess, time, received;
    auto operator<=>(const Quality&) const = default;
};

// Assigns units of one size to ranks: nearly equal areas, few rows to receive.
class Balancer {
public:
    // A row that travels takes as long as `cells_per_row` cells; 0 if it takes no time.
    Balancer(const Units& units, int num_ranks, int64_t cells_per_row);

    // Returns whether areas can be within the limit.
    bool can_balance() const { return most_even_ <= thousandths(allowed_ + kTolerance); }
    // Returns whether contiguous or zigzag units only need few moves to be balanced.
    bool is_nearly_balanced() const { return is_nearly_balanced_; }

    Assignment solve();
    // Improves a balanced assignment in which ranks have too many tiles for their areas: they give area to other ranks,
    // by swaps after which the larger of two ranks has a smaller share of the tiles.
    Assignment even_tiles(const Assignment& assignment, const TileWork& work);

    // Describe the assignment that solve() found.
    bool is_balanced() const { return found_.excess == 0 and can_balance(); }
    int64_t received() const { return found_.received; }
    int64_t time() const { return found_.time; }

    // Returns contiguous or zigzag units if they are nearly even and take less than `time`, otherwise nothing.
    Assignment shorter_runs(int64_t time) const;

private:
    static constexpr int kTolerance = 2;  // accepted beyond the limit, in thousandths

    int64_t thousandths(int count) const { return mean_ / 1000 * count + mean_ % 1000 * count / 1000; }
    int64_t largest_area(const Assignment& assignment) const;
    int64_t accepted() const { return std::max(most_even_, thousandths(allowed_ + kTolerance)); }
    int64_t limit() const { return std::max(most_even_, thousandths(allowed_)); }
    std::vector<int64_t> for_all(int64_t area) const { return std::vector<int64_t>(num_ranks_, area); }
    const Assignment* balanced_runs() const;
    std::vector<Assignment> first_assignments() const;
    bool can_search() const;
    Limits limits_of(const std::vector<RankChunks>& ranks) const;
    Quality quality_of(const std::vector<RankChunks>& ranks) const;
    Assignment search(const Assignment& assignment, Quality& quality) const;
    std::vector<RankChunks> ranks_of(const Assignment& assignment) const;

    const Units& units_;
    const int num_ranks_;
    const int64_t cells_per_row_;
    const int64_t mean_;
    const Assignment contiguous_, zigzag_, lpt_;
    const int64_t by_runs_;    // the largest area of a rank in one of the first two
    const int64_t most_even_;  // the same in one of the three
    int allowed_;              // largest over mean area, in thousandths
    bool is_nearly_balanced_ = false;
    Quality found_{.excess = INT64_MAX, .time = INT64_MAX, .received = INT64_MAX};
};

}  // namespace jaxmagi::planning
