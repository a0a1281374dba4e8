#include "csrc/planning/swap_search.h"

#include <algorithm>
#include <optional>

namespace jaxmagi::planning {
namespace {

constexpr int kSweeps = 14;
constexpr int kFirstShift = 3;   // the price of area above the limit starts at an eighth of the average and doubles
constexpr int kLeastShare = 16;  // of all rows: what is received at least for that average
constexpr int kFarthest = 64;  // pairs of ranks r, r + d with d up to this

class Search {
public:
    Search(std::vector<Hand>& hands, const Units& units, int64_t limit)
        : hands_(hands), units_(units), limit_(limit), changed_(hands.size(), 1) {
        const int num_ranks = static_cast<int>(hands.size());
        checked_.resize(static_cast<size_t>(num_ranks) * std::min(num_ranks, kFarthest));
    }

    void run();

private:
    struct Swap {
        int place_a, place_b;
    };

    bool sweep();
    bool improve(Hand& a, Hand& b);
    std::optional<Swap> best_swap(const Hand& a, const Hand& b);
    int64_t excess(int64_t area) const { return std::max<int64_t>(0, area - limit_); }
    int64_t priced(int64_t area) const { return area >> shift_; }

    std::vector<Hand>& hands_;
    const Units& units_;
    const int64_t limit_;
    int shift_ = 0;  // cells above the limit that weigh as much as one received row, as a power of two
    int clock_ = 1;
    std::vector<int> changed_, checked_;
    std::vector<int> cost_a_, cost_b_;
};

void Search::run() {
    const int64_t rows = units_.rows(units_.count() - 1).end;
    const int64_t received = std::max({int64_t{1}, rows / kLeastShare, quality_of(hands_, limit_).received});
    int64_t cells_per_row = units_.total_area() / received;
    for (shift_ = kFirstShift; cells_per_row > 1; cells_per_row /= 2)
        ++shift_;
    for (int i = 0; i < kSweeps; ++i) {
        if (not sweep() and quality_of(hands_, limit_).excess == 0)
            return;
        shift_ = std::max(0, shift_ - 1);
    }
}

bool Search::sweep() {
    const int num_ranks = static_cast<int>(hands_.size()), farthest = std::min(num_ranks - 1, kFarthest);
    bool changed = false;
    for (int distance = 1; distance <= farthest; ++distance)
        for (int rank = 0; rank + distance < num_ranks; ++rank) {
            const int other = rank + distance;
            int& checked = checked_[static_cast<size_t>(rank) * farthest + distance - 1];
            const bool is_balanced = hands_[rank].area() <= limit_ and hands_[other].area() <= limit_;
            if (is_balanced and checked >= std::max(changed_[rank], changed_[other]))
                continue;
            if (improve(hands_[rank], hands_[other])) {
                changed_[rank] = changed_[other] = ++clock_;
                changed = true;
            } else {
                checked = clock_;
            }
        }
    return changed;
}

bool Search::improve(Hand& a, Hand& b) {
    const std::optional<Swap> swap = best_swap(a, b);
    if (not swap)
        return false;
    const int from_a = a.members()[swap->place_a], from_b = b.members()[swap->place_b];
    a.exchange(swap->place_a, from_b);
    b.exchange(swap->place_b, from_a);
    return true;
}

std::optional<Search::Swap> Search::best_swap(const Hand& a, const Hand& b) {
    const int count = static_cast<int>(a.members().size());
    cost_a_.resize(count);
    cost_b_.resize(count);
    for (int i = 0; i < count; ++i) {
        cost_a_[i] = a.without(i) + b.with(a.members()[i]);
        cost_b_[i] = b.without(i) + a.with(b.members()[i]);
    }
    const int64_t excess_before = excess(a.area()) + excess(b.area());
    const int64_t most_saved = priced(excess_before);
    const int lowest_b = *std::ranges::min_element(cost_b_);
    std::optional<Swap> best;
    int64_t best_cost = 0;
    for (int i = 0; i < count; ++i) {
        // What is left out below is never negative, so this bounds all swaps of the unit.
        if (cost_a_[i] + lowest_b - most_saved >= best_cost)
            continue;
        const int unit = a.members()[i];
        for (int j = 0; j < count; ++j) {
            const int64_t rows = int64_t{cost_a_[i]} + cost_b_[j];
            if (rows - most_saved >= best_cost)
                continue;
            const int other = b.members()[j];
            const int64_t moved = units_.area(other) - units_.area(unit);
            const int64_t excess_after = excess(a.area() + moved) + excess(b.area() - moved);
            if (excess_after > excess_before)
                continue;
            int64_t cost = rows - priced(excess_before - excess_after);
            if (cost >= best_cost)
                continue;
            cost += a.exchange_surcharge(i, other) + b.exchange_surcharge(j, unit);
            if (cost < best_cost) {
                best = {.place_a = i, .place_b = j};
                best_cost = cost;
            }
        }
    }
    return best;
}

}  // namespace

int64_t num_pairs(int num_ranks) {
    const int64_t farthest = std::min(num_ranks - 1, kFarthest);
    return farthest * num_ranks - farthest * (farthest + 1) / 2;
}

Quality quality_of(const std::vector<Hand>& hands, int64_t limit) {
    Quality quality{};
    for (const Hand& hand : hands) {
        quality.excess += std::max<int64_t>(0, hand.area() - limit);
        quality.received += hand.received();
    }
    return quality;
}

void reduce_rows(std::vector<Hand>& hands, const Units& units, int64_t limit) {
    Search(hands, units, limit).run();
}

}  // namespace jaxmagi::planning
