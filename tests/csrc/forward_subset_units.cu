// Tests forward calls that compute some of the tiles: those that see no keys from own_len on, from keys before it
// alone, and those that do. Together they write what one call for all tiles writes, bit for bit, and each nothing else.
// A call for the former goes on with the latter, part of the heads after part, as far as their keys have arrived. Own
// keys of these are where the rank has them. Where the parts have received ones, own ones are NaN but for the last.
// The last step over parts of the keys adds sinks for wanted tiles alone.
// Keys of all heads are more than a section of work items has.

#include <algorithm>
#include <utility>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/mask/band.h"
#include "tests/csrc/check.h"
#include "tests/csrc/tile_schedule.h"

namespace jaxmagi::test {
namespace {

using namespace sm90;

constexpr int kBatch = 2, kQueries = 1000, kOwn = 4000, kKeys = 5000, kBands = 30;
constexpr int kHeads = 8, kKeyHeads = 4, kDim = 128;
constexpr size_t kRows = size_t{kBatch} * kQueries * kHeads;
constexpr uint16_t kPoison = 0xffff;
constexpr float kPoisonLse = 1e30f;
constexpr int kManySms = 1000;  // more than there are work items
const cudaStream_t kStream = cudaStreamPerThread;

using Numbers = std::vector<uint16_t>;

struct Result {
    Numbers out;
    std::vector<float> lse;

    bool operator==(const Result&) const = default;
};

// The result on the device, poison where nothing is written.
struct DeviceResult {
    DeviceArray<uint16_t> out{Numbers(kRows * kDim, kPoison)};
    DeviceArray<float> lse{std::vector<float>(kRows, kPoisonLse)};

    Result to_host() const { return {out.to_host(), lse.to_host()}; }
};

// A call for parts of the heads begins like this, and this does the rest when all keys have arrived.
struct Steps {
    int num_parts, num_arrived;  // when the call begins
    bool has_own_tiles;          // before the parts
    bool is_helped;              // the rest is done by SMs that help the call, not by another one
    bool is_drained = false;     // an SM of the call has ended before, so that the others do not go on
};

// Returns the rows [0, length) of each example.
Numbers first_rows(const Numbers& keys, int length) {
    constexpr int kRow = kKeyHeads * kDim;
    Numbers first;
    for (int example = 0; example < kBatch; ++example) {
        const auto begin = keys.begin() + size_t{kKeys} * example * kRow;
        first.insert(first.end(), begin, begin + static_cast<size_t>(length) * kRow);
    }
    return first;
}

// Returns keys as arrays of parts of the heads, without own keys that are in no block with received ones.
Numbers cut(const Numbers& keys, int num_parts, int first_row) {
    const int width = kKeyHeads / num_parts * kDim;
    Numbers arrays;
    for (int part = 0; part < num_parts; ++part)
        for (int row = 0; row < kBatch * kKeys; ++row) {
            const auto begin = keys.begin() + (size_t{1} * row * num_parts + part) * width;
            if (row % kKeys < first_row)
                arrays.insert(arrays.end(), width, kPoison);
            else
                arrays.insert(arrays.end(), begin, begin + width);
        }
    return arrays;
}

std::vector<float> different_sinks() {
    std::vector<float> sinks;
    for (int head = 0; head < kHeads; ++head)
        sinks.push_back(0.5f * head);
    return sinks;
}

// Pairs of ranges of keys about the end of own ones: runs that are short, or whose remainders may share a block.
constexpr Range kAtTheEnd[][2] = {
    {{3990, 4020}, {100, 300}},   {{3921, 3950}, {3960, 4007}}, {{3920, 3990}, {4000, 4200}},
    {{3700, 4030}, {4100, 4331}}, {{3500, 3985}, {3990, 4205}}, {{3600, 4000}, {4000, 4400}},
    {{3000, 3245}, {3300, 4025}}, {{3999, 4000}, {4000, 4001}}};
static_assert(kOwn == 4000);

// Bands of one mask. Those of queries in `received` may see all keys, and others own ones only. Pairs of bands have the
// same queries.
std::vector<int32_t> random_bands(std::mt19937& random, Range received) {
    const auto draw = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    std::vector<int32_t> bands;
    for (int i = 0; i < kBands; ++i) {
        const int pair = i / 2 * 2;
        const int q0 = kQueries * pair / kBands, q1 = kQueries * (pair + 2) / kBands;
        const bool sees_all = received.begin <= q0 and q1 <= received.end;
        const int end = sees_all ? kKeys - draw(0, 50) : draw(2, kOwn), middle = draw(1, end - 1);
        Range keys = i % 2 == 0 ? Range{draw(0, middle - 1), middle} : Range{middle, end};
        if (sees_all and draw(0, 1) == 0)
            keys = kAtTheEnd[pair / 2 % std::size(kAtTheEnd)][i % 2];
        for (const int x : {q0, q1, keys.begin, keys.end, -kUnbounded, kUnbounded})
            bands.push_back(x);
    }
    return bands;
}

class Problem {
public:
    // num_masks: 1, or one for each example.
    Problem(std::mt19937& random, Range received, int num_masks)
        : num_masks_(num_masks), all_k_(random_numbers<BFloat16>(size_t{kBatch} * kKeys * kKeyHeads * kDim, random())),
          all_v_(random_numbers<BFloat16>(all_k_.size(), random())),
          q_(random_numbers<BFloat16>(kRows * kDim, random())), k_(all_k_), v_(all_v_),
          own_k_(first_rows(all_k_, kOwn)), own_v_(first_rows(all_v_, kOwn)), sinks_(different_sinks()),
          schedule_(bands_of_masks(random, received, num_masks),
                    {.num_masks = num_masks,
                     .capacity = kBands,
                     .q_len = kQueries,
                     .kv_len = kKeys,
                     .own_len = num_masks == 1 ? kOwn : kKeys,
                     .by_keys = false,
                     .tile_rows = tile().rows,
                     .block_keys = tile().keys},
                    kStream) {}

    Result attend(Tiles subset) const {
        const DeviceResult result;
        const DeviceArray<int> counters(std::vector<int>(2, 0));
        ForwardParams params = to_params(subset, result, counters.data());
        params.drained = reinterpret_cast<uint32_t*>(counters.data() + 1);
        must(attention_forward(params, kStream), "attending");
        if (counters.to_host()[1] != 1)
            must(cudaErrorUnknown, "setting the flag");
        return result.to_host();
    }

    // Attends with one SM for each work item, which has it without a claim: the counter is neither cleared nor read.
    Result attend_without_claims(Tiles subset) const {
        const DeviceResult result;
        const DeviceArray<int> counter(std::vector<int>(1, 0));
        ForwardParams params = to_params(subset, result, counter.data());
        params.counter_is_zero = false;
        params.num_sms = kManySms;
        must(attention_forward(params, kStream), "attending without claims");
        return result.to_host();
    }

    // Returns what is written by a call for parts, of the tiles with received keys or, with several masks, of all, and
    // what is when the rest is done.
    std::pair<Result, Result> attend_in_parts(const Steps& steps) const {
        const DeviceResult result;
        const int first_row = kOwn - own_keys_of_blocks(tile());
        const DeviceArray<uint16_t> k(cut(all_k_, steps.num_parts, first_row));
        const DeviceArray<uint16_t> v(cut(all_v_, steps.num_parts, first_row));
        const DeviceArray<int> counters(std::vector<int>(1 + steps.num_parts, 0));
        const DeviceArray<uint32_t> drained(std::vector<uint32_t>(1, 1));
        const DeviceArray<uint32_t> arrived(std::vector<uint32_t>(1, steps.num_arrived));
        ForwardParams parts =
            to_params(num_masks_ == 1 ? Tiles::kSeeReceived : Tiles::kAll, result, counters.data() + 1);
        parts.heads /= steps.num_parts;
        parts.kv_heads = parts.kv_row_heads = kKeyHeads / steps.num_parts;
        parts.num_parts = steps.num_parts;
        parts.num_arrived = arrived.data();
        parts.k = k.data();
        parts.v = v.data();
        parts.own = {own_k_.data(), own_v_.data(), kOwn, kKeyHeads};
        parts.claims_all = true;
        ForwardParams own = to_params(Tiles::kSeeOwn, result, counters.data());
        own.next = &parts;
        ForwardParams first = steps.has_own_tiles ? own : parts;
        first.drained = steps.is_drained ? drained.data() : nullptr;
        must(attention_forward(first, kStream), "attending");
        const Result before = result.to_host();
        must(cudaMemcpy(arrived.data(), &parts.num_parts, sizeof(int), cudaMemcpyHostToDevice), "setting the flag");
        must(steps.is_helped ? help_attention_forward(first, 20, kStream) : attention_forward(parts, kStream),
             "attending to what is left");
        return {before, result.to_host()};
    }

    // Returns for each query whether its tile sees received keys.
    std::vector<bool> sees_received() const {
        std::vector<bool> sees(kQueries);
        for (const ScheduledTile& scheduled : schedule_.tiles_on_host())
            for (int row = 0; row < tile().rows; ++row)
                if (const int query = scheduled.index() * tile().rows + row; query < kQueries)
                    sees[query] = scheduled.sees_received();
        return sees;
    }

private:
    ForwardParams to_params(Tiles subset, const DeviceResult& result, int* counter) const {
        const bool owned = subset == Tiles::kSeeOwn;
        ForwardParams params{};
        params.dtype = DType::kBF16;
        params.batch = kBatch;
        params.q_len = kQueries;
        params.kv_len = params.key_end = owned ? kOwn : kKeys;
        params.heads = params.q_row_heads = params.row_heads = kHeads;
        params.kv_heads = params.kv_row_heads = kKeyHeads;
        params.dim = params.v_dim = kDim;
        params.q = q_.data();
        params.k = (owned ? own_k_ : k_).data();
        params.v = (owned ? own_v_ : v_).data();
        params.num_masks = num_masks_;
        params.capacity = kBands;
        params.bands = schedule_.sorted();
        params.tiles = schedule_.tiles();
        params.subset = subset;
        params.from_last_tile = subset == Tiles::kSeeReceived;
        params.sinks = sinks_.data();
        params.out = result.out.data();
        params.lse = result.lse.data();
        params.counter = counter;
        params.counter_is_zero = true;
        params.scale = 0.1f;
        params.num_sms = 50;
        return params;
    }

    static std::vector<int32_t> bands_of_masks(std::mt19937& random, Range received, int num_masks) {
        std::vector<int32_t> bands;
        for (int mask = 0; mask < num_masks; ++mask) {
            const std::vector<int32_t> more = random_bands(random, received);
            bands.insert(bands.end(), more.begin(), more.end());
        }
        return bands;
    }
    static TileShape tile() { return *forward_tile(kDim, kDim); }

    int num_masks_;
    Numbers all_k_, all_v_;
    DeviceArray<uint16_t> q_, k_, v_, own_k_, own_v_;
    DeviceArray<float> sinks_;
    TileSchedule schedule_;
};

// Returns the rows for which `is_wanted(query, head)` holds, and poison elsewhere.
Result rows_of(const Result& all, auto is_wanted) {
    Result rows{Numbers(all.out.size(), kPoison), std::vector<float>(all.lse.size(), kPoisonLse)};
    for (size_t row = 0; row < kRows; ++row)
        if (is_wanted(row / kHeads % kQueries, static_cast<int>(row % kHeads))) {
            std::copy_n(all.out.begin() + row * kDim, kDim, rows.out.begin() + row * kDim);
            rows.lse[row] = all.lse[row];
        }
    return rows;
}

void check_subsets(Verdict& verdict, const std::string& name, const Problem& problem, const Result& all,
                   const std::vector<bool>& sees) {
    verdict.expect(name + ": without claims", problem.attend_without_claims(Tiles::kAll) == all);
    verdict.expect(name + ": own",
                   problem.attend(Tiles::kSeeOwn) == rows_of(all, [&](size_t query, int) { return not sees[query]; }));
    verdict.expect(name + ": others", problem.attend(Tiles::kSeeReceived) ==
                                          rows_of(all, [&](size_t query, int) { return sees[query]; }));
}

// sees: whether the tiles of queries are those of parts.
void check_parts(Verdict& verdict, const std::string& name, const Problem& problem, const Result& all,
                 const std::vector<bool>& sees, const Steps& steps) {
    const auto [before, after] = problem.attend_in_parts(steps);
    // Without own tiles the call begins with the first part.
    const int num_parts = std::max(steps.is_drained ? 0 : steps.num_arrived, steps.has_own_tiles ? 0 : 1);
    const int num_heads = kHeads / steps.num_parts * num_parts;
    const std::string text = name + ": " + std::to_string(steps.num_arrived) + " of " +
                             std::to_string(steps.num_parts) + " parts" +
                             (steps.has_own_tiles ? " behind own tiles" : "") + (steps.is_helped ? ", helped" : "") +
                             (steps.is_drained ? ", when another SM has ended" : "");
    verdict.expect(text + ", before others arrive", before == rows_of(all, [&](size_t query, int head) {
                                                        return sees[query] ? head < num_heads : steps.has_own_tiles;
                                                    }));
    verdict.expect(text + ", in the end", after == rows_of(all, [&](size_t query, int) {
                                              return sees[query] or steps.has_own_tiles;
                                          }));
}

// Checks each number of parts, and how many of them have arrived before. Helpers go on whatever others do.
void check_all_parts(Verdict& verdict, const std::string& name, const Problem& problem, const Result& all,
                     const std::vector<bool>& sees, bool may_have_own_tiles) {
    for (const int num_parts : {1, 2, 4})
        for (int num_arrived = 0; num_arrived <= num_parts; ++num_arrived)
            for (const bool is_helped : {false, true})
                for (const bool is_drained : {false, true})
                    for (int has_own_tiles = 0; has_own_tiles <= may_have_own_tiles; ++has_own_tiles)
                        check_parts(verdict, name, problem, all, sees,
                                    {num_parts, num_arrived, has_own_tiles != 0, is_helped, is_drained});
}

// Finishes a result in float, and compares it with that by the formula. Rows of tiles that are not wanted stay poison.
void check_finish(Verdict& verdict, std::mt19937& random, bool has_flags) {
    constexpr int kRowHeads = kHeads + 3, kTileRows = 96;
    std::vector<uint8_t> is_wanted((kQueries + kTileRows - 1) / kTileRows);
    std::ranges::generate(is_wanted, [&] { return random() % 2; });
    std::vector<float> out(kRows * kDim), lse(kRows), want_lse(kRows / kHeads * kRowHeads, kPoisonLse);
    std::ranges::generate(out, [&] { return static_cast<float>(random() % 1000) / 500 - 1; });
    std::ranges::generate(lse, [&] { return random() % 9 == 0 ? -INFINITY : static_cast<float>(random() % 100) / 20; });
    const std::vector<float> sinks = different_sinks();
    std::vector<float> want(want_lse.size() * kDim, Host<BFloat16>::to_float(kPoison));
    for (size_t i = 0; i < kRows; ++i) {
        const size_t row = i / kHeads, to = row * kRowHeads + i % kHeads;
        if (has_flags and not is_wanted[row % kQueries / kTileRows])
            continue;
        const double total = std::log(std::exp(double{lse[i]}) + std::exp(double{sinks[i % kHeads]}));
        const bool is_empty = lse[i] == -INFINITY;
        want_lse[to] = is_empty ? -INFINITY : static_cast<float>(total);
        for (int j = 0; j < kDim; ++j)
            want[to * kDim + j] = is_empty ? 0 : out[i * kDim + j] * static_cast<float>(std::exp(lse[i] - total));
    }
    const DeviceArray from(out), from_lse(lse), device_sinks(sinks);
    const DeviceArray flags(is_wanted);
    const DeviceArray to(Numbers(want.size(), kPoison));
    const DeviceArray to_lse(std::vector<float>(want_lse.size(), kPoisonLse));
    must(finish_attention_forward({.out = from.data(),
                                   .lse = from_lse.data(),
                                   .sinks = device_sinks.data(),
                                   .to_out = to.data(),
                                   .to_lse = to_lse.data(),
                                   .dtype = DType::kBF16,
                                   .is_wanted = has_flags ? flags.data() : nullptr,
                                   .tile_rows = kTileRows,
                                   .q_len = kQueries,
                                   .rows = kBatch * kQueries,
                                   .heads = kHeads,
                                   .row_heads = kRowHeads,
                                   .v_dim = kDim},
                                  kStream),
         "finishing");
    const std::string name = has_flags ? "finish: wanted tiles" : "finish: all tiles";
    const auto near = [](float got, float wanted) {  // also where both are poison
        return std::isnan(wanted) ? std::isnan(got) : got == wanted or std::abs(got - wanted) < 0.005f;
    };
    const Numbers got = to.to_host();
    std::vector<float> floats(got.size());
    std::ranges::transform(got, floats.begin(), Host<BFloat16>::to_float);
    verdict.expect(name + ", out", std::ranges::equal(floats, want, near));
    verdict.expect(name + ", lse", std::ranges::equal(to_lse.to_host(), want_lse, near));
}

int run() {
    std::mt19937 random(0);
    Verdict verdict;
    for (const bool has_flags : {false, true})
        check_finish(verdict, random, has_flags);
    must(preload_forward(DType::kBF16, kDim, kDim, false), "loading the kernels");
    const struct {
        const char* name;
        Range queries;
        int count;  // of queries whose tile sees received keys, or -1
    } cases[] = {{"some tiles", {300, 500}, -1}, {"no tile", {0, 0}, 0}, {"all tiles", {0, kQueries}, kQueries}};
    for (const auto& [name, queries, count] : cases) {
        const Problem problem(random, queries, 1);
        const Result all = problem.attend(Tiles::kAll);
        const std::vector<bool> sees = problem.sees_received();
        const auto found = std::ranges::count(sees, true);
        verdict.expect(std::string(name) + " see received keys",
                       count < 0 ? 0 < found and found < kQueries : found == count);
        verdict.expect(std::string(name) + ": all are written", std::ranges::count(all.out, kPoison) == 0);
        check_subsets(verdict, name, problem, all, sees);
        check_all_parts(verdict, name, problem, all, sees, true);
    }
    const Problem problem(random, {300, 500}, kBatch);
    const Result all = problem.attend(Tiles::kAll);
    check_all_parts(verdict, "a mask for each example", problem, all, std::vector<bool>(kQueries, true), false);
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
