// Tests forward calls that compute some of the tiles: those that see no keys from own_len on, from keys before it
// alone, and those that do. Together they write what one call for all tiles writes, bit for bit, and each nothing else.
// A call for the former goes on with the latter if their keys have arrived.
// Keys of all heads are more than a section of work items has.

#include <algorithm>
#include <utility>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/mask/band.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace sm90;

constexpr int kBatch = 2, kQueries = 1000, kOwn = 4000, kKeys = 5000, kBands = 30;
constexpr int kHeads = 8, kKeyHeads = 4, kDim = 128;
constexpr size_t kRows = size_t{kBatch} * kQueries * kHeads;
constexpr uint16_t kPoison = 0xffff;
const cudaStream_t kStream = cudaStreamPerThread;

using Numbers = std::vector<uint16_t>;

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

// Bands of one mask. Those of queries in `received` may see all keys, and others own ones only.
std::vector<int32_t> random_bands(std::mt19937& random, Range received) {
    const auto draw = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    std::vector<int32_t> bands;
    for (int i = 0; i < kBands; ++i) {
        const int q0 = kQueries * i / kBands, q1 = kQueries * (i + 1) / kBands;
        const bool sees_all = received.begin <= q0 and q1 <= received.end;
        const int k1 = sees_all ? kKeys - draw(0, 50) : draw(1, kOwn), k0 = draw(0, k1 - 1);
        for (const int x : {q0, q1, k0, k1, -kUnbounded, kUnbounded})
            bands.push_back(x);
    }
    return bands;
}

class Problem {
public:
    Problem(std::mt19937& random, Range received)
        : q_(random_numbers<BFloat16>(kRows * kDim, random())),
          all_k_(random_numbers<BFloat16>(size_t{kBatch} * kKeys * kKeyHeads * kDim, random())),
          all_v_(random_numbers<BFloat16>(all_k_.size(), random())),
          k_(all_k_), v_(all_v_), own_k_(first_rows(all_k_, kOwn)), own_v_(first_rows(all_v_, kOwn)),
          sinks_(std::vector<float>(kHeads, -INFINITY)), lse_(std::vector<float>(kRows)),
          bands_(random_bands(random, received)), sorted_(std::vector<ScheduledBand>(kBands)), tiles_(std::vector<ScheduledTile>(num_tiles())),
          workspace_(std::vector<uint64_t>(
              tile_schedule_workspace_words(1, kBands, kQueries, tile().rows))) {
        must(make_tile_schedule({.bands = bands_.data(),
                                 .num_masks = 1,
                                 .capacity = kBands,
                                 .q_len = kQueries,
                                 .kv_len = kKeys,
                                 .own_len = kOwn,
                                 .by_keys = false,
                                 .tile_rows = tile().rows,
                                 .block_keys = tile().keys,
                                 .sorted = sorted_.data(),
                                 .tiles = tiles_.data(),
                                 .workspace = workspace_.data()},
                                kStream),
             "scheduling");
    }

    Numbers attend(Tiles subset) {
        const DeviceArray<uint16_t> out(Numbers(kRows * kDim, kPoison));
        const DeviceArray<int> counters(std::vector<int>(2, 0));
        const ForwardParams params = to_params(subset, out.data(), counters.data(), counters.data() + 1);
        must(attention_forward(params, kStream), "attending");
        if (counters.to_host()[1] != 1)
            must(cudaErrorUnknown, "setting the flag");
        return out.to_host();
    }

    // Computes own tiles, from where CTAs go on with the others if their keys have arrived. Returns what is written
    // then, and when a call for what is left has ended.
    std::pair<Numbers, Numbers> attend_and_go_on(bool arrived) {
        const DeviceArray<uint16_t> out(Numbers(kRows * kDim, kPoison));
        const DeviceArray<int> counters(std::vector<int>{0, 0, 0, arrived});
        ForwardParams others = to_params(Tiles::kSeeReceived, out.data(), counters.data() + 1, nullptr);
        others.claims_all = true;
        ForwardParams own = to_params(Tiles::kSeeOwn, out.data(), counters.data(), counters.data() + 2);
        own.next = &others;
        own.next_arrived = reinterpret_cast<const uint32_t*>(counters.data() + 3);
        must(attention_forward(own, kStream), "attending");
        const Numbers first = out.to_host();
        must(attention_forward(others, kStream), "attending to what is left");
        return {first, out.to_host()};
    }

    // Returns for each query whether its tile sees received keys.
    std::vector<bool> sees_received() const {
        std::vector<bool> sees(kQueries);
        for (const ScheduledTile& scheduled : tiles_.to_host())
            for (int row = 0; row < tile().rows; ++row)
                if (const int query = scheduled.index() * tile().rows + row; query < kQueries)
                    sees[query] = scheduled.sees_received();
        return sees;
    }

private:
    ForwardParams to_params(Tiles subset, uint16_t* out, int* counter, int* drained) {
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
        params.num_masks = 1;
        params.capacity = kBands;
        params.bands = sorted_.data();
        params.tiles = tiles_.data();
        params.subset = subset;
        params.from_last_tile = subset == Tiles::kSeeReceived;
        params.sinks = sinks_.data();
        params.out = out;
        params.lse = lse_.data();
        params.counter = counter;
        params.counter_is_zero = true;
        params.drained = reinterpret_cast<uint32_t*>(drained);
        params.scale = 0.1f;
        params.num_sms = 50;
        return params;
    }

    static TileShape tile() { return *forward_tile(kDim, kDim); }
    static int num_tiles() { return (kQueries + tile().rows - 1) / tile().rows; }

    DeviceArray<uint16_t> q_;
    Numbers all_k_, all_v_;
    DeviceArray<uint16_t> k_, v_, own_k_, own_v_;
    DeviceArray<float> sinks_, lse_;
    DeviceArray<int32_t> bands_;
    DeviceArray<ScheduledBand> sorted_;
    DeviceArray<ScheduledTile> tiles_;
    DeviceArray<uint64_t> workspace_;
};

// Returns the rows of the queries for which `wanted` holds, and poison elsewhere.
Numbers rows_of(const Numbers& out, const std::vector<bool>& sees_received, bool wanted) {
    Numbers rows(out.size(), kPoison);
    constexpr size_t kRow = size_t{kHeads} * kDim;
    for (size_t row = 0; row < size_t{kBatch} * kQueries; ++row)
        if (sees_received[row % kQueries] == wanted)
            std::copy_n(out.begin() + row * kRow, kRow, rows.begin() + row * kRow);
    return rows;
}

int run() {
    std::mt19937 random(0);
    Verdict verdict;
    must(preload_forward(DType::kBF16, kDim, kDim, false), "loading the kernels");
    const struct {
        const char* name;
        Range queries;
        int count;  // of queries whose tile sees received keys, or -1
    } cases[] = {{"some tiles", {300, 500}, -1}, {"no tile", {0, 0}, 0}, {"all tiles", {0, kQueries}, kQueries}};
    for (const auto& [name, queries, count] : cases) {
        Problem problem(random, queries);
        const Numbers all = problem.attend(Tiles::kAll);
        const std::vector<bool> sees = problem.sees_received();
        const auto found = std::ranges::count(sees, true);
        verdict.expect(std::string(name) + " see received keys",
                       count < 0 ? 0 < found and found < kQueries : found == count);
        verdict.expect(std::string(name) + ": all are written", std::ranges::count(all, kPoison) == 0);
        verdict.expect(std::string(name) + ": own", problem.attend(Tiles::kSeeOwn) == rows_of(all, sees, false));
        verdict.expect(std::string(name) + ": others", problem.attend(Tiles::kSeeReceived) == rows_of(all, sees, true));
        for (const bool arrived : {false, true}) {
            const auto [first, second] = problem.attend_and_go_on(arrived);
            verdict.expect(std::string(name) + (arrived ? ": all in one call" : ": own before keys arrive"),
                           first == (arrived ? all : rows_of(all, sees, false)));
            verdict.expect(std::string(name) + ": all in two calls", second == all);
        }
    }
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
