#include "csrc/planning/balance.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "csrc/common/math.h"
#include "csrc/planning/first_deal.h"
#include "csrc/planning/hand.h"
#include "csrc/planning/swap_search.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {
namespace {

constexpr int kFewestGroups = 8, kMostGroups = 16;
constexpr int kFewUnits = 512;                     // several searches take little time
constexpr int64_t kMostSwaps = int64_t{1} << 30;   // pairs of units that a search may have to look at, again and again
constexpr int64_t kMostRuns = int64_t{1} << 28;    // ranks times units, for a deal in runs

// Largest over mean area, in thousandths. Where neither contiguous nor zigzag units are nearly balanced, area is what
// makes keys travel, and the more ranks there are, the more an area above the mean saves.
constexpr int kTight = 1008, kLoose = 1045, kFewRanks = 8, kManyRanks = 64;
constexpr int kNearlyBalanced = 1500;
constexpr int kTolerance = 2;  // beyond the limit, if no other deal is within

// How many of a rank's chunks to deal as one: as few as leave 8 to 16 groups, or 1.
int group_size(int chunks) {
    for (int groups = kMostGroups; groups >= kFewestGroups; --groups)
        if (chunks % groups == 0)
            return chunks / groups;
    return 1;
}

int64_t thousandths(int64_t area, int count) {
    return area / 1000 * count + area % 1000 * count / 1000;
}

class Balancer {
public:
    Balancer(const Units& units, int num_ranks) : units_(units), num_ranks_(num_ranks), most_even_(lpt_area()) {
        mean_ = units.total_area() / num_ranks;
    }

    Deal solve();
    bool accepts(const Deal& deal) const { return largest_area(deal) <= thousandths(mean_, allowed_ + kTolerance); }

private:
    int64_t lpt_area() const { return largest_area(largest_first_deal(units_, num_ranks_)); }
    int64_t largest_area(const Deal& deal) const;
    int64_t accepted() const { return std::max(most_even_, thousandths(mean_, allowed_ + kTolerance)); }
    int64_t limit() const { return std::max(most_even_, thousandths(mean_, allowed_)); }
    std::vector<Deal> first_deals();
    bool can_search() const;
    Deal search(const Deal& deal, Quality& quality) const;
    std::vector<Hand> hands_of(const Deal& deal) const;

    const Units& units_;
    const int num_ranks_;
    const int64_t most_even_;  // largest area of a rank, by LPT
    int64_t mean_;
    int allowed_ = kTight;
};

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

// Where the searches begin. A deal that is balanced and made of long runs leaves little to find.
std::vector<Deal> Balancer::first_deals() {
    const int count = units_.count();
    const Deal contiguous = contiguous_deal(count, num_ranks_), zigzag = zigzag_deal(count, num_ranks_);
    for (const Deal& deal : {contiguous, zigzag})
        if (largest_area(deal) <= limit())
            return {deal};
    if (not can_search() or int64_t{num_ranks_} * count > kMostRuns)
        return {};
    std::vector<Deal> deals;
    const bool is_nearly_balanced =
        std::min(largest_area(contiguous), largest_area(zigzag)) <= thousandths(mean_, kNearlyBalanced);
    if (not is_nearly_balanced) {
        const int doublings = std::bit_width(static_cast<unsigned>(std::clamp(num_ranks_, kFewRanks, kManyRanks))) -
                              std::bit_width(static_cast<unsigned>(kFewRanks));
        allowed_ = kTight + (kLoose - kTight) * doublings / std::bit_width(unsigned{kManyRanks / kFewRanks - 1});
    }
    deals.push_back(two_run_deal(units_, num_ranks_, limit(), 1));
    if (count <= kFewUnits)
        deals.push_back(two_run_deal(units_, num_ranks_, limit(), 2));
    if (count <= kFewUnits or is_nearly_balanced)
        deals.push_back(contiguous);
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
    return per_rank <= kMostSwaps / pairs / per_rank;
}

Deal Balancer::search(const Deal& deal, Quality& quality) const {
    std::vector<Hand> hands = hands_of(deal);
    if (can_search())
        reduce_rows(hands, units_, limit());
    quality = quality_of(hands, accepted());
    Deal found;
    for (const Hand& hand : hands)
        found.emplace_back(hand.members().begin(), hand.members().end());
    return found;
}

Deal Balancer::solve() {
    Deal best;
    Quality lowest{.excess = INT64_MAX, .received = INT64_MAX};
    const auto consider = [&](const Deal& first) {
        Quality quality{};
        Deal deal = search(first, quality);
        if (quality < lowest) {
            best = std::move(deal);
            lowest = quality;
        }
    };
    for (const Deal& first : first_deals())
        consider(first);
    const Deal lpt = largest_first_deal(units_, num_ranks_);
    if (lowest.excess > 0 or quality_of(hands_of(lpt), accepted()) < lowest)
        consider(lpt);
    return best;
}

}  // namespace

std::vector<int> balanced_owners(std::span<const Band> bands, int length, int num_ranks, int chunk) {
    const int per_rank = std::max(1, ceil_div(ceil_div(length, chunk), num_ranks));
    int group = group_size(per_rank);
    const auto deal_units = [&](Deal& deal) {
        const Units units(bands, length, chunk * group, per_rank / group * num_ranks);
        Balancer balancer(units, num_ranks);
        deal = balancer.solve();
        return balancer.accepts(deal);
    };
    Deal deal;
    if (not deal_units(deal) and group > 1) {
        group = 1;
        deal_units(deal);
    }
    std::vector<int> owners(static_cast<size_t>(per_rank) * num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank)
        for (const int unit : deal[rank])
            std::fill_n(owners.begin() + static_cast<int64_t>(unit) * group, group, rank);
    return owners;
}

}  // namespace jaxmagi::planning
