#include "csrc/planning/balancer.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <utility>

namespace jaxmagi::planning {
namespace {

constexpr int kFewUnits = 512;                    // several searches take little time
constexpr int64_t kMostSwaps = int64_t{1} << 30;  // pairs of units that a search may have to look at, again and again
constexpr int64_t kMostRuns = int64_t{1} << 28;   // ranks times units, for a deal in runs

// Largest over mean area, in thousandths. Where contiguous or zigzag units are nearly balanced, moving little makes
// areas equal. Elsewhere area is what makes keys travel, and the more ranks there are, the more an area above the mean
// saves: kLooser for every eightfold number of them.
constexpr int kTight = 1008, kLooser = 22, kFewRanks = 8, kManyRanks = 1024;
constexpr int kNearlyBalanced = 1500;
constexpr int kMostOfRuns = 1025;  // where neighbours stay together and that takes less time
constexpr int kTileTolerance = 3;   // of tiles, instead of areas
constexpr int kAreaTolerance = 15;  // of areas with few tiles
constexpr int64_t kMostPieces = int64_t{1} << 19;  // of bands, whose tiles are counted

int loose_limit(int num_ranks) {
    const auto ranks = static_cast<unsigned>(std::clamp(num_ranks, kFewRanks, kManyRanks));
    return kTight + kLooser * (std::bit_width(ranks / kFewRanks) - 1) / 3;
}

// Whether a deal is worth a search of its own: for less than a percent of the time it is not.
bool is_better(Quality a, Quality b) {
    return a.excess < b.excess or (a.excess == b.excess and a.time <= b.time - b.time / 100 and a < b);
}

Deal deal_of(const std::vector<Hand>& hands) {
    Deal deal;
    for (const Hand& hand : hands)
        deal.emplace_back(hand.members().begin(), hand.members().end());
    return deal;
}

}  // namespace

Balancer::Balancer(const Units& units, int num_ranks, int64_t cells_per_row)
    : units_(units),
      num_ranks_(num_ranks),
      cells_per_row_(cells_per_row),
      mean_(units.total_area() / num_ranks),
      contiguous_(contiguous_deal(units.count(), num_ranks)),
      zigzag_(zigzag_deal(units.count(), num_ranks)),
      lpt_(largest_first_deal(units, num_ranks)),
      by_runs_(std::min(largest_area(contiguous_), largest_area(zigzag_))),
      most_even_(std::min(largest_area(lpt_), by_runs_)),
      allowed_(kTight) {
    if (by_runs_ <= limit() or not can_search())
        return;
    is_nearly_balanced_ = by_runs_ <= thousandths(kNearlyBalanced);
    if (not is_nearly_balanced_)
        allowed_ = loose_limit(num_ranks);
}

int64_t Balancer::largest_area(const Deal& deal) const {
    int64_t largest = 0;
    for (const auto& members : deal) {
        int64_t area = 0;
        for (const int unit : members)
            area += units_.area(unit);
        largest = std::max(largest, area);
    }
    return largest;
}

// A balanced deal of long runs, if there is one.
const Deal* Balancer::balanced_runs() const {
    for (const Deal* deal : {&contiguous_, &zigzag_})
        if (largest_area(*deal) <= limit())
            return deal;
    return nullptr;
}

// Where the searches begin otherwise.
std::vector<Deal> Balancer::first_deals() const {
    const int count = units_.count();
    if (not can_search())
        return {};
    std::vector<Deal> deals{two_run_deal(units_, num_ranks_, limit(), 1)};
    if (count <= kFewUnits)
        deals.push_back(two_run_deal(units_, num_ranks_, limit(), 2));
    if (count <= kFewUnits or is_nearly_balanced_)
        deals.push_back(contiguous_);
    return deals;
}

std::vector<Hand> Balancer::hands_of(const Deal& deal) const {
    std::vector<Hand> hands;
    hands.reserve(deal.size());
    for (const auto& members : deal)
        hands.emplace_back(units_, members);
    return hands;
}

bool Balancer::can_search() const {
    const int64_t per_rank = units_.count() / num_ranks_, pairs = std::max<int64_t>(1, num_pairs(num_ranks_));
    return per_rank <= kMostSwaps / pairs / per_rank and int64_t{num_ranks_} * units_.count() <= kMostRuns;
}

// In cells. Transfers run beside the compute, but not all of them: a quarter is taken to be waited for.
Quality Balancer::quality_of(const std::vector<Hand>& hands) const {
    int64_t area = 0, rows = 0;
    for (const Hand& hand : hands) {
        area = std::max(area, hand.area());
        rows = std::max(rows, hand.received());
    }
    if (cells_per_row_ > 0)
        rows = std::max(rows, std::ranges::max(sent_rows(hands, demand_of(hands, units_))));
    const int64_t transfers = rows * cells_per_row_;
    return {.excess = area_above(hands, for_all(accepted())),
            .time = cells_per_row_ > 0 ? std::max(area, transfers) + transfers / 4 : 0,
            .received = received_rows(hands)};
}

// So many rows that they take no longer than a tenth of the compute, if ranks can share them so: short transfers are
// not worth the merge of a stage that would hide them. What ranks receive is harder to share than what they send.
Limits Balancer::limits_of(const std::vector<Hand>& hands) const {
    if (cells_per_row_ == 0)
        return {.areas = for_all(limit()), .sent = INT64_MAX, .received = INT64_MAX};
    const int64_t equal = received_rows(hands) / num_ranks_, short_rows = mean_ / cells_per_row_ / 10;
    return {.areas = for_all(limit()),
            .sent = std::max(short_rows, equal + equal / 4),
            .received = std::max(short_rows, 2 * equal)};
}

Deal Balancer::search(const Deal& deal, Quality& quality) const {
    std::vector<Hand> hands = hands_of(deal);
    if (can_search())
        reduce_rows(hands, units_, limits_of(hands));
    quality = quality_of(hands);
    return deal_of(hands);
}

Deal Balancer::solve() {
    Deal best;
    const auto consider = [&](const Deal& first, auto is_preferred) {
        Quality quality{};
        Deal deal = search(first, quality);
        if (is_preferred(quality, found_)) {
            best = std::move(deal);
            found_ = quality;
        }
    };
    if (const Deal* runs = balanced_runs()) {
        // Units that leave runs cost tiles at all new ends.
        best = *runs;
        found_ = quality_of(hands_of(best));
        consider(best, is_better);
    } else {
        for (const Deal& first : first_deals())
            consider(first, std::less{});
    }
    if (found_.excess > 0 or is_better(quality_of(hands_of(lpt_)), found_))
        consider(lpt_, std::less{});
    return best;
}

Deal Balancer::shorter_runs(int64_t time) const {
    Deal shortest;
    for (const Deal* runs : {&contiguous_, &zigzag_}) {
        if (largest_area(*runs) > thousandths(kMostOfRuns))
            continue;
        if (const int64_t of_runs = quality_of(hands_of(*runs)).time; of_runs < time) {
            shortest = *runs;
            time = of_runs;
        }
    }
    return shortest;
}

Deal Balancer::even_tiles(const Deal& deal, const TileWork& work) {
    const double limit = (allowed_ + kTileTolerance) / 1000.0;
    TileShares shares(deal, work);
    if (not can_search() or shares.largest() <= limit)
        return deal;
    std::vector<Hand> hands = hands_of(deal);
    Limits limits = limits_of(hands);
    const int64_t most_area = std::max(most_even_, thousandths(allowed_ + kAreaTolerance));
    const auto limit_area = [&](int rank) {
        const double most = static_cast<double>(most_area), area = static_cast<double>(hands[rank].area()) * limit;
        limits.areas[rank] = area < most * shares[rank] ? static_cast<int64_t>(area / shares[rank]) : most_area;
    };
    for (int rank = 0; rank < num_ranks_; ++rank)
        limit_area(rank);
    int64_t left = kMostPieces;
    reduce_areas(hands, units_, limits, [&](int rank, int other) {
        left -= work.num_pieces(hands[rank].members()) + work.num_pieces(hands[other].members());
        if (left < 0 or std::max(hands[rank].area(), hands[other].area()) > most_area)
            return false;
        const double least = std::max(shares[rank], shares[other]);
        const auto [fewer, more] = std::minmax(rank, other, [&](int a, int b) { return shares[a] < shares[b]; });
        const double share = shares.of(hands[fewer].members());  // the one that is likely to become too large
        if (share >= least)
            return false;
        const double share_of_more = shares.of(hands[more].members());
        if (share_of_more >= least)
            return false;
        shares[fewer] = share;
        shares[more] = share_of_more;
        limit_area(rank);
        limit_area(other);
        return true;
    });
    found_.received = received_rows(hands);
    return deal_of(hands);
}

}  // namespace jaxmagi::planning
