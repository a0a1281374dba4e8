#include "csrc/planning/first_assignment.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace jaxmagi::planning {

Assignment contiguous_assignment(int count, int num_ranks) {
    Assignment assignment(num_ranks, std::vector<int>(count / num_ranks));
    for (int unit = 0; unit < count; ++unit)
        assignment[unit / (count / num_ranks)][unit % (count / num_ranks)] = unit;
    return assignment;
}

Assignment zigzag_assignment(int count, int num_ranks) {
    const int per_rank = count / num_ranks, half = per_rank / 2;
    Assignment assignment(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
        for (int i = 0; i < half; ++i)
            assignment[rank].push_back(rank * half + i);
        for (int i = 0; i < per_rank - half; ++i)
            assignment[rank].push_back(count - (rank + 1) * (per_rank - half) + i);
    }
    return assignment;
}

Assignment largest_first_assignment(const Units& units, int num_ranks) {
    std::vector<int> order(units.count());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater{}, [&](int unit) { return units.area(unit); });
    Assignment assignment(num_ranks);
    using Load = std::pair<int64_t, int>;  // area, rank
    std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
    for (int rank = 0; rank < num_ranks; ++rank)
        loads.push({0, rank});
    for (const int unit : order) {
        const auto [area, rank] = loads.top();
        loads.pop();
        assignment[rank].push_back(unit);
        if (static_cast<int>(assignment[rank].size()) < units.count() / num_ranks)
            loads.push({area + units.area(unit), rank});
    }
    return assignment;
}

namespace {

constexpr int kMostRunLengths = 6;  // lengths of the first run that are tried

// Gives each rank two runs of the units that are left. A run is a range of indices of `rest_`.
class TwoRunAssigner {
public:
    TwoRunAssigner(const Units& units, int per_rank, int64_t limit, int area_weight)
        : units_(units), per_rank_(per_rank), area_weight_(area_weight), rest_(units.count()) {
        std::iota(rest_.begin(), rest_.end(), 0);
        size_ = length_of(units.rows(0));
        while (limit >> shift_ >= int64_t{1} << 29)
            ++shift_;
        limit_ = limit >> shift_;
    }

    std::vector<int> assign_rank();

private:
    struct RunPair {
        Range first, second;
        int64_t score;  // the smaller, the better
    };

    int64_t area_of(Range run) const { return area_before_[run.end] - area_before_[run.begin]; }
    Range rows_of(Range run) const {
        return {units_.rows(rest_[run.begin]).begin, units_.rows(rest_[run.end - 1]).end};
    }
    void find_anchor();
    Range first_run(int count) const;
    RunPair best_runs() const;
    void try_second_runs(Range first, RunPair& best) const;
    int64_t cost_of_first(Range run) const;
    int64_t cost_of_second(Range run) const;
    RunPair lightest_runs() const;
    std::vector<int> take(const RunPair& runs);

    const Units& units_;
    const int per_rank_, area_weight_;
    int size_, shift_ = 0;
    int64_t limit_;  // of areas, which are scaled by 2^-shift_, so that products with rows fit into 64 bits
    std::vector<int> rest_;
    std::vector<int64_t> area_before_;
    int anchor_ = 0;
    int64_t anchor_rows_ = 0;  // remote keys of the anchor
    Range needed_{};           // hull of the keys that the anchor needs
    bool backwards_ = true;    // the first run ends at the anchor
};

std::vector<int> TwoRunAssigner::assign_rank() {
    area_before_.assign(1, 0);
    for (const int unit : rest_)
        area_before_.push_back(area_before_.back() + (units_.area(unit) >> shift_));
    find_anchor();
    const RunPair best = best_runs();
    return take(is_empty(best.first) ? lightest_runs() : best);
}

void TwoRunAssigner::find_anchor() {
    anchor_ = 0;
    for (int i = 1; i < static_cast<int>(rest_.size()); ++i)
        if (units_.area(rest_[i]) >= units_.area(rest_[anchor_]))
            anchor_ = i;
    const int unit = rest_[anchor_];
    needed_ = units_.rows(unit);
    for (const Range& keys : units_.remote(unit))
        needed_ = {std::min(needed_.begin, keys.begin), std::max(needed_.end, keys.end)};
    const int before = units_.remote_before(unit), after = units_.remote_after(unit);
    backwards_ = before >= after;
    anchor_rows_ = before + after;
}

Range TwoRunAssigner::first_run(int count) const {
    return backwards_ ? Range{anchor_ + 1 - count, anchor_ + 1} : Range{anchor_, anchor_ + count};
}

TwoRunAssigner::RunPair TwoRunAssigner::best_runs() const {
    RunPair best{.first = {0, 0}, .second = {0, 0}, .score = INT64_MAX};
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

void TwoRunAssigner::try_second_runs(Range first, RunPair& best) const {
    const int count = per_rank_ - (first.end - first.begin);
    const int64_t first_cost = cost_of_first(first), first_area = area_of(first);
    const auto consider = [&](Range second, int64_t rows, int64_t area) {
        const int64_t score = 2 * rows * limit_ - area_weight_ * anchor_rows_ * area;
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

int64_t TwoRunAssigner::cost_of_first(Range run) const {
    return units_.remote_before(rest_[run.begin]) + units_.remote_after(rest_[run.end - 1]);
}

// Estimates the rows that a run adds to those of the anchor, and the rows that the ranks of its neighbours will
// receive. It assumes that a run needs keys beyond its two ends only.
int64_t TwoRunAssigner::cost_of_second(Range run) const {
    const Range rows = rows_of(run);
    const int count = run.end - run.begin, most = count * size_;
    const bool begins_inside = needed_.begin <= rows.begin and rows.begin < needed_.end;
    const bool ends_inside = needed_.begin < rows.end and rows.end <= needed_.end;
    int64_t cost = -std::min(length_of(intersect(rows, needed_)), most);
    if (not begins_inside) {
        const int unit = rest_[run.begin];
        cost += units_.remote_before(unit);
        if (run.begin > 0 and rest_[run.begin - 1] == unit - 1)
            cost += std::min(units_.remote_after(unit - 1), most);
    }
    if (not ends_inside) {
        const int unit = rest_[run.end - 1];
        cost += units_.remote_after(unit);
        if (run.end < static_cast<int>(rest_.size()) and rest_[run.end] == unit + 1)
            cost += std::min(units_.remote_before(unit + 1), most);
    }
    return cost;
}

// Returns the anchor and the run with the smallest area, for ranks where nothing is within the limit.
TwoRunAssigner::RunPair TwoRunAssigner::lightest_runs() const {
    RunPair best{.first = {anchor_, anchor_ + 1}, .second = {0, 0}, .score = INT64_MAX};
    const int count = per_rank_ - 1;
    for (int begin = 0; begin + count <= static_cast<int>(rest_.size()); ++begin) {
        const Range second{begin, begin + count};
        if (is_empty(intersect(second, best.first)) and area_of(second) < best.score)
            best = {.first = best.first, .second = second, .score = area_of(second)};
    }
    if (is_empty(best.second) and count > 0) {  // the anchor is in the middle of the last units
        const int begin = std::clamp(anchor_ - count, 0, static_cast<int>(rest_.size()) - per_rank_);
        best.first = {begin, begin + per_rank_};
    }
    return best;
}

std::vector<int> TwoRunAssigner::take(const RunPair& runs) {
    std::vector<int> taken, left;
    for (int i = 0; i < static_cast<int>(rest_.size()); ++i) {
        const bool is_taken = (runs.first.begin <= i and i < runs.first.end) or
                              (runs.second.begin <= i and i < runs.second.end);
        (is_taken ? taken : left).push_back(rest_[i]);
    }
    rest_ = std::move(left);
    return taken;
}

}  // namespace

Assignment two_run_assignment(const Units& units, int num_ranks, int64_t limit, int area_weight) {
    TwoRunAssigner assigner(units, units.count() / num_ranks, limit, area_weight);
    Assignment assignment(num_ranks);
    for (auto& members : assignment)
        members = assigner.assign_rank();
    // Ranks with near numbers then share documents: the search compares only those, and they share a host.
    std::ranges::sort(assignment, {}, [&](const std::vector<int>& members) {
        return *std::ranges::max_element(members, {}, [&](int unit) { return units.area(unit); });
    });
    return assignment;
}

}  // namespace jaxmagi::planning
