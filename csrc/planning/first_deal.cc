#include "csrc/planning/first_deal.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace jaxmagi::planning {

Deal contiguous_deal(int count, int num_ranks) {
    Deal deal(num_ranks, std::vector<int>(count / num_ranks));
    for (int unit = 0; unit < count; ++unit)
        deal[unit / (count / num_ranks)][unit % (count / num_ranks)] = unit;
    return deal;
}

Deal zigzag_deal(int count, int num_ranks) {
    const int per_rank = count / num_ranks, half = per_rank / 2;
    Deal deal(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
        for (int i = 0; i < half; ++i)
            deal[rank].push_back(rank * half + i);
        for (int i = 0; i < per_rank - half; ++i)
            deal[rank].push_back(count - (rank + 1) * (per_rank - half) + i);
    }
    return deal;
}

Deal largest_first_deal(const Units& units, int num_ranks) {
    std::vector<int> order(units.count());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater{}, [&](int unit) { return units.area(unit); });
    Deal deal(num_ranks);
    using Load = std::pair<int64_t, int>;  // area, rank
    std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
    for (int rank = 0; rank < num_ranks; ++rank)
        loads.push({0, rank});
    for (const int unit : order) {
        const auto [area, rank] = loads.top();
        loads.pop();
        deal[rank].push_back(unit);
        if (static_cast<int>(deal[rank].size()) < units.count() / num_ranks)
            loads.push({area + units.area(unit), rank});
    }
    return deal;
}

namespace {

constexpr int kMostRunLengths = 6;  // of the first run, that are tried

// Deals two runs of what is left at a time. Indices are those of `rest_`; runs are [begin, end) of them.
class TwoRunDealer {
public:
    TwoRunDealer(const Units& units, int per_rank, int64_t limit, int eagerness)
        : units_(units), per_rank_(per_rank), eagerness_(eagerness), rest_(units.count()) {
        std::iota(rest_.begin(), rest_.end(), 0);
        size_ = length_of(units.rows(0));
        while (limit >> shift_ >= int64_t{1} << 29)
            ++shift_;
        limit_ = limit >> shift_;
    }

    std::vector<int> deal_rank();

private:
    struct Choice {
        Range first, second;
        int64_t score;  // the smaller, the better
    };

    int64_t area_of(Range run) const { return area_before_[run.end] - area_before_[run.begin]; }
    Range rows_of(Range run) const {
        return {units_.rows(rest_[run.begin]).begin, units_.rows(rest_[run.end - 1]).end};
    }
    void find_anchor();
    Range first_run(int count) const;
    Choice best_choice() const;
    void try_second_runs(Range first, Choice& best) const;
    int64_t cost_of_first(Range run) const;
    int64_t cost_of_second(Range run) const;
    Choice lightest_choice() const;
    std::vector<int> take(const Choice& choice);

    const Units& units_;
    const int per_rank_, eagerness_;
    int size_, shift_ = 0;
    int64_t limit_;  // areas are scaled by 2^-shift_, so that products with rows fit into 64 bits
    std::vector<int> rest_;
    std::vector<int64_t> area_before_;
    int anchor_ = 0;
    int64_t anchor_rows_ = 0;  // foreign to the anchor
    Range needed_{};           // the hull of what the anchor needs
    bool backwards_ = true;    // the first run ends at the anchor
};

std::vector<int> TwoRunDealer::deal_rank() {
    area_before_.assign(1, 0);
    for (const int unit : rest_)
        area_before_.push_back(area_before_.back() + (units_.area(unit) >> shift_));
    find_anchor();
    const Choice best = best_choice();
    return take(is_empty(best.first) ? lightest_choice() : best);
}

void TwoRunDealer::find_anchor() {
    anchor_ = 0;
    for (int i = 1; i < static_cast<int>(rest_.size()); ++i)
        if (units_.area(rest_[i]) >= units_.area(rest_[anchor_]))
            anchor_ = i;
    const int unit = rest_[anchor_];
    needed_ = units_.rows(unit);
    for (const Range& keys : units_.foreign(unit))
        needed_ = {std::min(needed_.begin, keys.begin), std::max(needed_.end, keys.end)};
    const int before = units_.foreign_before(unit), behind = units_.foreign_behind(unit);
    backwards_ = before >= behind;
    anchor_rows_ = before + behind;
}

Range TwoRunDealer::first_run(int count) const {
    return backwards_ ? Range{anchor_ + 1 - count, anchor_ + 1} : Range{anchor_, anchor_ + count};
}

TwoRunDealer::Choice TwoRunDealer::best_choice() const {
    Choice best{.first = {0, 0}, .second = {0, 0}, .score = INT64_MAX};
    int tried = 0;
    for (int count = per_rank_; count >= 1 and tried < kMostRunLengths; --count) {
        const Range first = first_run(count);
        if (first.begin < 0 or first.end > static_cast<int>(rest_.size()) or area_of(first) > limit_)
            continue;
        ++tried;
        try_second_runs(first, best);
    }
    return best;
}

void TwoRunDealer::try_second_runs(Range first, Choice& best) const {
    const int count = per_rank_ - (first.end - first.begin);
    const int64_t first_cost = cost_of_first(first), first_area = area_of(first);
    const auto consider = [&](Range second, int64_t rows, int64_t area) {
        const int64_t score = 2 * rows * limit_ - eagerness_ * anchor_rows_ * area;
        if (score < best.score)
            best = {.first = first, .second = second, .score = score};
    };
    if (count == 0)
        return consider({0, 0}, first_cost, first_area);
    for (int begin = 0; begin + count <= static_cast<int>(rest_.size()); ++begin) {
        const Range second{begin, begin + count};
        if (not is_empty(intersect(second, first))) {
            begin = first.end - 1;
            continue;
        }
        const int64_t area = first_area + area_of(second);
        if (area <= limit_)
            consider(second, first_cost + cost_of_second(second), area);
    }
}

int64_t TwoRunDealer::cost_of_first(Range run) const {
    return units_.foreign_before(rest_[run.begin]) + units_.foreign_behind(rest_[run.end - 1]);
}

// Received rows of a run beside those of the anchor, and those that whoever gets its neighbours will receive. An
// estimate: it takes what a run needs to reach out from its two ends.
int64_t TwoRunDealer::cost_of_second(Range run) const {
    const Range rows = rows_of(run);
    const int count = run.end - run.begin, most = count * size_;
    const bool begins_inside = needed_.begin <= rows.begin and rows.begin < needed_.end;
    const bool ends_inside = needed_.begin < rows.end and rows.end <= needed_.end;
    int64_t cost = -std::min(length_of(intersect(rows, needed_)), most);
    if (not begins_inside) {
        const int unit = rest_[run.begin];
        cost += units_.foreign_before(unit);
        if (run.begin > 0 and rest_[run.begin - 1] == unit - 1)
            cost += std::min(units_.foreign_behind(unit - 1), most);
    }
    if (not ends_inside) {
        const int unit = rest_[run.end - 1];
        cost += units_.foreign_behind(unit);
        if (run.end < static_cast<int>(rest_.size()) and rest_[run.end] == unit + 1)
            cost += std::min(units_.foreign_before(unit + 1), most);
    }
    return cost;
}

// Where nothing respects the limit: the anchor and the run with the smallest area.
TwoRunDealer::Choice TwoRunDealer::lightest_choice() const {
    Choice best{.first = {anchor_, anchor_ + 1}, .second = {0, 0}, .score = INT64_MAX};
    const int count = per_rank_ - 1;
    for (int begin = 0; begin + count <= static_cast<int>(rest_.size()); ++begin) {
        const Range second{begin, begin + count};
        if (is_empty(intersect(second, best.first)) and area_of(second) < best.score)
            best = {.first = best.first, .second = second, .score = area_of(second)};
    }
    if (is_empty(best.second) and count > 0) {  // the anchor lies in the middle of the little that is left
        const int begin = std::clamp(anchor_ - count, 0, static_cast<int>(rest_.size()) - per_rank_);
        best.first = {begin, begin + per_rank_};
    }
    return best;
}

std::vector<int> TwoRunDealer::take(const Choice& choice) {
    std::vector<int> taken, left;
    for (int i = 0; i < static_cast<int>(rest_.size()); ++i) {
        const bool is_taken = (choice.first.begin <= i and i < choice.first.end) or
                              (choice.second.begin <= i and i < choice.second.end);
        (is_taken ? taken : left).push_back(rest_[i]);
    }
    rest_ = std::move(left);
    return taken;
}

}  // namespace

Deal two_run_deal(const Units& units, int num_ranks, int64_t limit, int eagerness) {
    TwoRunDealer dealer(units, units.count() / num_ranks, limit, eagerness);
    Deal deal(num_ranks);
    for (auto& members : deal)
        members = dealer.deal_rank();
    // Ranks with near numbers then share documents, which the search and the links between hosts profit from.
    std::ranges::sort(deal, {}, [&](const std::vector<int>& members) {
        return *std::ranges::max_element(members, {}, [&](int unit) { return units.area(unit); });
    });
    return deal;
}

}  // namespace jaxmagi::planning
