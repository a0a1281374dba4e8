#include "csrc/planning/balancer.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <utility>

namespace jaxmagi::planning {
namespace {

// Bounds of the time of a plan, chosen by trial: up to kFewUnits units several searches take little time, beyond
// kMostSwaps pairs of units or kMostRuns ranks times units none is made, and even_tiles stops after kMostPieces pieces.
constexpr int kFewUnits = 512;
constexpr int64_t kMostSwaps = int64_t{1} << 30, kMostRuns = int64_t{1} << 28, kMostPieces = int64_t{1} << 19;

// The allowed largest over mean area, in thousandths. Plans are to be within 1 % of the mean: kTight, and kTolerance on
// top. Within 5 thousandths, documents over 8 ranks took 3.5 ms to plan, and video masks over 32 ranks received 4.4
// instead of 1.4 times their own rows.
//
// Where contiguous or zigzag units are not nearly balanced, an even area makes keys travel, and the more ranks there
// are, the more rows it costs. So every eightfold number of ranks allows kLooser more: 1.008 for 8 ranks, 1.030 for 64,
// 1.059 for 1024. Compared with 1.045 for 64 and more, 64 ranks have more even work (1.048 instead of 1.061) at the
// same predicted time, and 1024 ranks are predicted to take 115 instead of 139 ms.
constexpr int kTight = 1008, kLooser = 22, kFewRanks = 8, kManyRanks = 1024;

// Below this largest over mean area, moving few units makes contiguous or zigzag units equal (chosen by trial).
constexpr int kNearlyBalanced = 1500;

// Contiguous or zigzag units within this area stay where a search is predicted to take longer: a video mask over 32
// ranks takes 108 instead of 110 ms, and receives half as many rows.
constexpr int kMostOfRuns = 1025;

// even_tiles accepts work in tiles up to kTileTolerance beyond the limit of areas, and lets areas grow by
// kAreaTolerance for it: documents over 8 ranks come from 1.038 to 1.011 of the mean work. Both were chosen by trial.
constexpr int kTileTolerance = 3, kAreaTolerance = 15;

int loose_limit(int num_ranks) {
    const auto ranks = static_cast<unsigned>(std::clamp(num_ranks, kFewRanks, kManyRanks));
    return kTight + kLooser * (std::bit_width(ranks / kFewRanks) - 1) / 3;
}

// Returns whether an assignment is better by enough to break up runs of neighbours or to be searched, that is by a
// percent of the time. Without that margin a causal mask left its runs for 0.01 % fewer rows, and lost 1.6 % to tiles
// at new ends.
bool is_better(Quality a, Quality b) {
    return a.excess < b.excess or (a.excess == b.excess and a.time <= b.time - b.time / 100 and a < b);
}

Assignment assignment_of(const std::vector<RankChunks>& ranks) {
    Assignment assignment;
    for (const RankChunks& rank : ranks)
        assignment.emplace_back(rank.members().begin(), rank.members().end());
    return assignment;
}

}  // namespace

Balancer::Balancer(const Units& units, int num_ranks, int64_t cells_per_row)
    : units_(units),
      num_ranks_(num_ranks),
      cells_per_row_(cells_per_row),
      mean_(units.total_area() / num_ranks),
      contiguous_(contiguous_assignment(units.count(), num_ranks)),
      zigzag_(zigzag_assignment(units.count(), num_ranks)),
      lpt_(largest_first_assignment(units, num_ranks)),
      by_runs_(std::min(largest_area(contiguous_), largest_area(zigzag_))),
      most_even_(std::min(largest_area(lpt_), by_runs_)),
      allowed_(kTight) {
    if (by_runs_ <= limit() or not can_search())
        return;
    is_nearly_balanced_ = by_runs_ <= thousandths(kNearlyBalanced);
    if (not is_nearly_balanced_)
        allowed_ = loose_limit(num_ranks);
}

int64_t Balancer::largest_area(const Assignment& assignment) const {
    int64_t largest = 0;
    for (const auto& members : assignment) {
        int64_t area = 0;
        for (const int unit : members)
            area += units_.area(unit);
        largest = std::max(largest, area);
    }
    return largest;
}

// Returns contiguous or zigzag units if one of them is balanced.
const Assignment* Balancer::balanced_runs() const {
    for (const Assignment* assignment : {&contiguous_, &zigzag_})
        if (largest_area(*assignment) <= limit())
            return assignment;
    return nullptr;
}

// Returns where the searches begin if neither contiguous nor zigzag units are balanced.
std::vector<Assignment> Balancer::first_assignments() const {
    const int count = units_.count();
    if (not can_search())
        return {};
    std::vector<Assignment> assignments{two_run_assignment(units_, num_ranks_, limit(), 1)};
    if (count <= kFewUnits)
        assignments.push_back(two_run_assignment(units_, num_ranks_, limit(), 2));
    if (count <= kFewUnits or is_nearly_balanced_)
        assignments.push_back(contiguous_);
    return assignments;
}

std::vector<RankChunks> Balancer::ranks_of(const Assignment& assignment) const {
    std::vector<RankChunks> ranks;
    ranks.reserve(assignment.size());
    for (const auto& members : assignment)
        ranks.emplace_back(units_, members);
    return ranks;
}

bool Balancer::can_search() const {
    const int64_t per_rank = units_.count() / num_ranks_, pairs = std::max<int64_t>(1, num_pairs(num_ranks_));
    return per_rank <= kMostSwaps / pairs / per_rank and int64_t{num_ranks_} * units_.count() <= kMostRuns;
}

// The time is in cells. Transfers overlap with the compute, but not entirely, so it is the longer of the two plus a
// quarter of the transfers. The quarter was chosen by trial: a larger part prefers fewer rows to more even areas.
Quality Balancer::quality_of(const std::vector<RankChunks>& ranks) const {
    int64_t area = 0, rows = 0;
    for (const RankChunks& rank : ranks) {
        area = std::max(area, rank.area());
        rows = std::max(rows, rank.received());
    }
    if (cells_per_row_ > 0)
        rows = std::max(rows, std::ranges::max(sent_rows(ranks, demand_of(ranks, units_))));
    const int64_t transfers = rows * cells_per_row_;
    return {.excess = area_above(ranks, for_all(accepted())),
            .time = cells_per_row_ > 0 ? std::max(area, transfers) + transfers / 4 : 0,
            .received = received_rows(ranks)};
}

// Above these limits, rows have a price in the search. Transfers up to a tenth of the mean compute are free: they are
// not worth the merge of a stage that would hide them. Ranks cannot share more rows than that evenly, so up to 1.25
// times the mean of what they send, and twice the mean of what they receive, which is harder to share, are free too.
//
// Predicted for packed documents (docs/log/planner.md): a tenth instead of a half makes 4 and 8 ranks 0.2 to 2 %
// faster; a twentieth gains up to 0.4 % more, at 5 % more rows. Twice the mean makes 1024 ranks 3.5 % faster; 1.25 or
// 1.5 times gains 4 to 6 % with 512 and 1024 ranks, but makes single plans up to 10 % slower, and the search takes 1.4
// times as long.
Limits Balancer::limits_of(const std::vector<RankChunks>& ranks) const {
    if (cells_per_row_ == 0)
        return {.areas = for_all(limit()), .sent = INT64_MAX, .received = INT64_MAX};
    const int64_t equal = received_rows(ranks) / num_ranks_, short_rows = mean_ / cells_per_row_ / 10;
    return {.areas = for_all(limit()),
            .sent = std::max(short_rows, equal + equal / 4),
            .received = std::max(short_rows, 2 * equal)};
}

Assignment Balancer::search(const Assignment& assignment, Quality& quality) const {
    std::vector<RankChunks> ranks = ranks_of(assignment);
    if (can_search())
        reduce_rows(ranks, units_, limits_of(ranks));
    quality = quality_of(ranks);
    return assignment_of(ranks);
}

Assignment Balancer::solve() {
    Assignment best;
    const auto consider = [&](const Assignment& first, auto is_preferred) {
        Quality quality{};
        Assignment assignment = search(first, quality);
        if (is_preferred(quality, found_)) {
            best = std::move(assignment);
            found_ = quality;
        }
    };
    if (const Assignment* runs = balanced_runs()) {
        // Units that leave runs cost partial tiles at every new end.
        best = *runs;
        found_ = quality_of(ranks_of(best));
        consider(best, is_better);
    } else {
        for (const Assignment& first : first_assignments())
            consider(first, std::less{});
    }
    if (found_.excess > 0 or is_better(quality_of(ranks_of(lpt_)), found_))
        consider(lpt_, std::less{});
    return best;
}

Assignment Balancer::shorter_runs(int64_t time) const {
    Assignment shortest;
    for (const Assignment* runs : {&contiguous_, &zigzag_}) {
        if (largest_area(*runs) > thousandths(kMostOfRuns))
            continue;
        if (const int64_t of_runs = quality_of(ranks_of(*runs)).time; of_runs < time) {
            shortest = *runs;
            time = of_runs;
        }
    }
    return shortest;
}

Assignment Balancer::even_tiles(const Assignment& assignment, const TileWork& work) {
    const double limit = (allowed_ + kTileTolerance) / 1000.0;
    TileShares shares(assignment, work);
    if (not can_search() or shares.largest() <= limit)
        return assignment;
    std::vector<RankChunks> ranks = ranks_of(assignment);
    Limits limits = limits_of(ranks);
    const int64_t most_area = std::max(most_even_, thousandths(allowed_ + kAreaTolerance));
    const auto limit_area = [&](int rank) {
        const double most = static_cast<double>(most_area), area = static_cast<double>(ranks[rank].area()) * limit;
        limits.areas[rank] = area < most * shares[rank] ? static_cast<int64_t>(area / shares[rank]) : most_area;
    };
    for (int rank = 0; rank < num_ranks_; ++rank)
        limit_area(rank);
    int64_t left = kMostPieces;
    reduce_areas(ranks, units_, limits, [&](int rank, int other) {
        left -= work.num_pieces(ranks[rank].members()) + work.num_pieces(ranks[other].members());
        if (left < 0 or std::max(ranks[rank].area(), ranks[other].area()) > most_area)
            return false;
        const double least = std::max(shares[rank], shares[other]);
        const auto [fewer, more] = std::minmax(rank, other, [&](int a, int b) { return shares[a] < shares[b]; });
        const double share = shares.of(ranks[fewer].members());  // the share that is likely to become too large
        if (share >= least)
            return false;
        const double share_of_more = shares.of(ranks[more].members());
        if (share_of_more >= least)
            return false;
        shares[fewer] = share;
        shares[more] = share_of_more;
        limit_area(rank);
        limit_area(other);
        return true;
    });
    found_.received = received_rows(ranks);
    return assignment_of(ranks);
}

}  // namespace jaxmagi::planning
