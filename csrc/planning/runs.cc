#include "csrc/planning/runs.h"

namespace jaxmagi::planning {
namespace {

// Returns whether each token, the first included, is one more than the token before it. Has no branches, so that it
// becomes vector code.
bool are_consecutive(const int32_t* tokens, int count) {
    int32_t wrong = 0;
    for (int i = 0; i < count; ++i)
        wrong |= tokens[i] - tokens[i - 1] - 1;
    return wrong == 0;
}

}  // namespace

Runs runs_of_tokens(std::span<const int32_t> tokens) {
    Runs runs;
    for (size_t place = 0; place < tokens.size();) {
        const size_t first = place++;
        if (tokens[first] < 0)
            continue;
        constexpr int kBlock = 64;
        while (place + kBlock <= tokens.size() and are_consecutive(&tokens[place], kBlock))
            place += kBlock;
        while (place < tokens.size() and are_consecutive(&tokens[place], 1))
            ++place;
        runs.push_back({tokens[first], tokens[place - 1] + 1, static_cast<int>(first)});
    }
    std::ranges::sort(runs, {}, &Run::begin);
    return runs;
}

std::vector<Range> union_of(std::vector<Range> ranges) {
    std::erase_if(ranges, [](Range range) { return is_empty(range); });
    std::ranges::sort(ranges, {}, &Range::begin);
    std::vector<Range> merged;
    for (const Range range : ranges)
        if (not merged.empty() and range.begin <= merged.back().end)
            merged.back().end = std::max(merged.back().end, range.end);
        else
            merged.push_back(range);
    return merged;
}

namespace {

void append(Runs& buffer, Range tokens) {
    if (is_empty(tokens))
        return;
    const int place = buffer.empty() ? 0 : buffer.back().place + buffer.back().end - buffer.back().begin;
    buffer.push_back({tokens.begin, tokens.end, place});
}

}  // namespace

Runs without(const std::vector<Range>& ranges, const Runs& runs) {
    Runs left;
    for (Range range : ranges) {
        for (const Run& run : meeting(runs, range)) {
            append(left, {range.begin, run.begin});
            range.begin = run.end;
        }
        append(left, range);
    }
    return left;
}

int64_t num_rows(const Runs& runs) {
    int64_t rows = 0;
    for (const Run& run : runs)
        rows += run.end - run.begin;
    return rows;
}

}  // namespace jaxmagi::planning
