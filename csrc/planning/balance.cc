#include "csrc/planning/balance.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>

#include "csrc/common/math.h"
#include "csrc/mask/area.h"
#include "csrc/planning/first_deal.h"
#include "csrc/planning/hand.h"
#include "csrc/planning/swap_search.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {
namespace {

constexpr int kFewestGroups = 8, kMostGroups = 16;
constexpr int kFewUnits = 512;                    // several searches take little time
constexpr int64_t kMostSwaps = int64_t{1} << 30;  // pairs of units that a search may have to look at, again and again
constexpr int64_t kMostRuns = int64_t{1} << 28;   // ranks times units, for a deal in runs

// Largest over mean area, in thousandths. Where neither contiguous nor zigzag units are nearly balanced, area is what
// makes keys travel, and the more ranks there are, the more an area above the mean saves.
constexpr int kTight = 1008, kLoose = 1045, kFewRanks = 8, kManyRanks = 64;
constexpr int kNearlyBalanced = 1500;
constexpr int kTolerance = 2;  // beyond the limit, if no other deal is within
constexpr int64_t kMostCells = int64_t{1} << 60;  // of a time in cells, so that it stays within 64 bits

// How many of a rank's chunks to deal as one: as few as leave 8 to 16 groups, or 1.
int group_size(int chunks) {
    for (int groups = kMostGroups; groups >= kFewestGroups; --groups)
        if (chunks % groups == 0)
            return chunks / groups;
    return 1;
}

int smallest_factor(int number) {
    int factor = 2;
    while (number % factor != 0)
        ++factor;
    return factor;
}

int64_t thousandths(int64_t area, int count) {
    return area / 1000 * count + area % 1000 * count / 1000;
}

// Rises with the logarithm of the number of ranks.
int loose_limit(int num_ranks) {
    const auto octaves = [](int ranks) { return std::bit_width(static_cast<unsigned>(ranks / kFewRanks)) - 1; };
    return kTight + (kLoose - kTight) * octaves(std::clamp(num_ranks, kFewRanks, kManyRanks)) / octaves(kManyRanks);
}

// What makes a deal better than another: less area above the limit, then a shorter time of the slowest rank, then fewer
// rows.
struct Quality {
    int64_t excess, time, received;
    auto operator<=>(const Quality&) const = default;
};

// Whether a deal is worth a search of its own: for less than a percent of the time it is not.
bool is_better(Quality a, Quality b) {
    return a.excess < b.excess or (a.excess == b.excess and a.time <= b.time - b.time / 100 and a < b);
}

class Balancer {
public:
    Balancer(const Units& units, int num_ranks, int64_t cells_per_row)
        : units_(units),
          num_ranks_(num_ranks),
          cells_per_row_(cells_per_row),
          mean_(units.total_area() / num_ranks),
          lpt_(largest_first_deal(units, num_ranks)),
          most_even_(largest_area(lpt_)) {}

    Deal solve();
    int64_t received() const { return found_.received; }
    bool is_balanced() const { return found_.excess == 0 and accepted() == thousandths(mean_, allowed_ + kTolerance); }
    // Whether a few units have to leave long runs to balance them.
    bool is_nearly_balanced() const { return is_nearly_balanced_; }

private:
    int64_t largest_area(const Deal& deal) const;
    int64_t accepted() const { return std::max(most_even_, thousandths(mean_, allowed_ + kTolerance)); }
    int64_t limit() const { return std::max(most_even_, thousandths(mean_, allowed_)); }
    std::vector<Deal> first_deals();
    bool can_search() const;
    Limits limits_of(const std::vector<Hand>& hands) const;
    Quality quality_of(const std::vector<Hand>& hands) const;
    Deal search(const Deal& deal, Quality& quality) const;
    std::vector<Hand> hands_of(const Deal& deal) const;

    const Units& units_;
    const int num_ranks_;
    const int64_t cells_per_row_;
    const int64_t mean_;
    const Deal lpt_;
    const int64_t most_even_;  // the largest area of a rank in it
    int allowed_ = kTight;
    bool is_nearly_balanced_ = false;
    Quality found_{.excess = INT64_MAX, .time = INT64_MAX, .received = INT64_MAX};
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
    is_nearly_balanced_ =
        std::min(largest_area(contiguous), largest_area(zigzag)) <= thousandths(mean_, kNearlyBalanced);
    if (not is_nearly_balanced_)
        allowed_ = loose_limit(num_ranks_);
    deals.push_back(two_run_deal(units_, num_ranks_, limit(), 1));
    if (count <= kFewUnits)
        deals.push_back(two_run_deal(units_, num_ranks_, limit(), 2));
    if (count <= kFewUnits or is_nearly_balanced_)
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
    return {.excess = area_above(hands, accepted()),
            .time = cells_per_row_ > 0 ? std::max(area, transfers) + transfers / 4 : 0,
            .received = received_rows(hands)};
}

// So many rows that they take no longer than a tenth of the compute, if ranks can share them so: short transfers are
// not worth the merge of a stage that would hide them. What ranks receive is harder to share than what they send.
Limits Balancer::limits_of(const std::vector<Hand>& hands) const {
    if (cells_per_row_ == 0)
        return {.area = limit(), .sent = INT64_MAX, .received = INT64_MAX};
    const int64_t equal = received_rows(hands) / num_ranks_, short_rows = mean_ / cells_per_row_ / 10;
    return {.area = limit(),
            .sent = std::max(short_rows, equal + equal / 4),
            .received = std::max(short_rows, 2 * equal)};
}

Deal Balancer::search(const Deal& deal, Quality& quality) const {
    std::vector<Hand> hands = hands_of(deal);
    if (can_search())
        reduce_rows(hands, units_, limits_of(hands));
    quality = quality_of(hands);
    Deal found;
    for (const Hand& hand : hands)
        found.emplace_back(hand.members().begin(), hand.members().end());
    return found;
}

Deal Balancer::solve() {
    Deal best;
    const auto consider = [&](const Deal& first) {
        Quality quality{};
        Deal deal = search(first, quality);
        if (quality < found_) {
            best = std::move(deal);
            found_ = quality;
        }
    };
    for (const Deal& first : first_deals())
        consider(first);
    if (found_.excess > 0 or is_better(quality_of(hands_of(lpt_)), found_))
        consider(lpt_);
    return best;
}

// A deal of groups of so many chunks.
struct GroupedDeal {
    Deal deal;
    int group;
};

GroupedDeal deal_groups(std::span<const WeightedMask> masks, int length, int num_ranks, int chunk, int per_rank,
                        int64_t cells_per_row) {
    GroupedDeal best;
    int64_t received = INT64_MAX;  // of the best, if it is balanced
    int group = group_size(per_rank);
    for (bool is_first = true;; is_first = false) {
        const Units units(masks, length, chunk * group, per_rank / group * num_ranks);
        Balancer balancer(units, num_ranks, cells_per_row);
        Deal deal = balancer.solve();
        const bool is_balanced = balancer.is_balanced();
        if (received == INT64_MAX or (is_balanced and balancer.received() < received)) {
            best = {.deal = std::move(deal), .group = group};
            received = is_balanced ? balancer.received() : INT64_MAX;
        }
        if (group == 1 or (is_balanced and not (is_first and balancer.is_nearly_balanced())))
            return best;
        group /= smallest_factor(group);
    }
}

int64_t area_of(const WeightedMask& mask) {
    return std::transform_reduce(mask.bands.begin(), mask.bands.end(), int64_t{0}, std::plus{}, area);
}

// Of all layers that have the mask with the largest area, as long as ranks send and receive at most so many rows.
int64_t cells_per_row_of_layers(std::span<const WeightedMask> masks, int64_t cells_per_row, int64_t most_rows) {
    const int64_t layers = std::ranges::max_element(masks, {}, area_of)->weight, most = kMostCells / most_rows;
    return cells_per_row > most / layers ? most : cells_per_row * layers;
}

}  // namespace

std::vector<int> balanced_owners(std::span<const WeightedMask> masks, int length, int num_ranks, int chunk,
                                 int64_t cells_per_row) {
    const int per_rank = std::max(1, ceil_div(ceil_div(length, chunk), num_ranks));
    const auto [deal, group] =
        deal_groups(masks, length, num_ranks, chunk, per_rank,
                    cells_per_row_of_layers(masks, cells_per_row, length + int64_t{num_ranks} * chunk));
    std::vector<int> owners(static_cast<size_t>(per_rank) * num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank)
        for (const int unit : deal[rank])
            std::fill_n(owners.begin() + static_cast<int64_t>(unit) * group, group, rank);
    return owners;
}

std::vector<int> token_order(std::span<const int> owners, int length, int num_ranks, int chunk) {
    const size_t shard = owners.size() / num_ranks * chunk;
    std::vector<int> tokens(owners.size() * chunk, -1);
    std::vector<size_t> next(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank)
        next[rank] = rank * shard;
    for (size_t i = 0; i < owners.size(); ++i) {
        const int64_t begin = static_cast<int64_t>(i) * chunk;
        const auto place = tokens.begin() + next[owners[i]];
        std::iota(place, place + std::clamp<int64_t>(length - begin, 0, chunk), static_cast<int>(begin));
        next[owners[i]] += chunk;
    }
    return tokens;
}

}  // namespace jaxmagi::planning
