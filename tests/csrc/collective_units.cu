// The kernels of the collectives against the host, without XLA and NCCL. Two ranks take turns on one GPU: each reaches
// its own memory only, and the other one's rows go through pair buffers. The numbers are small whole ones, so that sums
// are exact in any order.

#include <algorithm>
#include <memory>

#include "csrc/collectives/transfer.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

constexpr int kRanks = 2, kGroups = 3, kEntries = 1600, kInputRows = 3200, kOutputRows = 3000, kPairRows = 2000;
constexpr int kSendingRows = 150;  // at either end of the input: so few that chunks there have to be cut
constexpr int kIdleGroup = 1;  // in which nobody sends anything
constexpr int kWidths[] = {16, 520};  // numbers of a row of each array
constexpr int kArrays = std::size(kWidths);
constexpr char kPoison = -1;  // NaN in all types
const cudaStream_t kStream = cudaStreamPerThread;  // a real one, as programs have; memcpy waits for it, and it for that

template <typename T> constexpr Number kNumber = Number::kF32;
template <> constexpr Number kNumber<__nv_bfloat16> = Number::kBF16;
template <> constexpr Number kNumber<__half> = Number::kF16;
template <> constexpr Number kNumber<double> = Number::kF64;

template <typename T> double to_double(T x) {
    return static_cast<double>(static_cast<float>(x));
}

// What all ranks' tables say together: an output row of a rank, and the input row that it gets.
struct Way {
    int group, from, row, to, peer_row;
};

struct Tables {
    std::vector<Send> sends[kRanks];  // [groups, entries], as the kernels take them
    std::vector<Receive> receives[kRanks];
    std::vector<Way> ways;
};

// Runs of random lengths from random rows, with gaps between them.
void add_group(Tables& tables, int group, std::mt19937& random) {
    const auto draw = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    std::vector<Send> sends[kRanks];
    int slots[kRanks][kRanks] = {};
    for (int to = 0; to < kRanks; ++to) {
        std::vector<Receive> receives;
        const size_t most = group == kIdleGroup ? 0 : kEntries / kRanks;
        for (int row = draw(0, 2), length; receives.size() < most; row += length + draw(0, 2)) {
            length = draw(1, 5);
            if (row + length > kOutputRows)
                break;
            const int from = draw(0, kRanks - 1), in_end = draw(0, kSendingRows - length);
            const int from_row = in_end + draw(0, 1) * (kInputRows - kSendingRows);
            int& slot = slots[from][to];
            receives.push_back({.peer = from, .slot = slot, .row = row, .length = length});
            sends[from].push_back({.peer = to, .slot = slot, .row = from_row, .length = length, .peer_row = row});
            for (int i = 0; i < length; ++i)
                tables.ways.push_back({group, from, from_row + i, to, row + i});
            slot += length;
        }
        receives.resize(kEntries);
        tables.receives[to].insert(tables.receives[to].end(), receives.begin(), receives.end());
    }
    for (int rank = 0; rank < kRanks; ++rank) {
        sends[rank].resize(kEntries);
        tables.sends[rank].insert(tables.sends[rank].end(), sends[rank].begin(), sends[rank].end());
    }
}

template <typename T> using Arrays = std::vector<std::unique_ptr<DeviceArray<T>>>;

// A rank's side of calls: its tables, its control block, and half of the pair buffers of both ranks.
class Rank {
public:
    Rank(int rank, const Tables& tables)
        : rank_(rank), sends_(tables.sends[rank]), receives_(tables.receives[rank]), control_({Control{}}) {}

    // Between arrays of T, and of Sum where these are added up.
    template <typename T, typename Sum> Transfer call(const Arrays<T>& from, const Arrays<Sum>& to, bool is_cast) {
        Transfer transfer{};
        transfer.rank = rank_;
        transfer.size = kRanks;
        transfer.native = uint64_t{1} << rank_;
        transfer.sends = sends_.data();
        transfer.receives = receives_.data();
        transfer.groups = kGroups;
        transfer.entries = kEntries;
        transfer.input_rows = kInputRows;
        transfer.output_rows = kOutputRows;
        transfer.pair_rows = kPairRows;
        transfer.number = kNumber<T>;
        transfer.sum_number = kNumber<Sum>;
        transfer.call = 1234;
        transfer.controls[rank_] = control_.data();
        transfer.timeout_ns = 60'000'000'000;
        transfer.num_sms = 7;
        transfer.num_arrays = kArrays;
        transfer.pair_bytes = sizeof(PairHeader);
        for (int i = 0; i < kArrays; ++i) {
            const int row_bytes = kWidths[i] * static_cast<int>(sizeof(T));
            transfer.arrays[i] = {.from = reinterpret_cast<const char*>(from[i]->data()),
                                  .to = reinterpret_cast<char*>(to[i]->data()),
                                  .row_bytes = row_bytes,
                                  .pair_offset = transfer.pair_bytes};
            transfer.pair_bytes += int64_t{kGroups} * kPairRows * row_bytes;
            transfer.places[i] = reinterpret_cast<uint64_t>(is_cast ? transfer.arrays[i].to : transfer.arrays[i].from);
        }
        const std::vector<char> poison(kRanks * transfer.pair_bytes, kPoison);
        outgoing_ = std::make_unique<DeviceArray<char>>(poison);
        incoming_ = std::make_unique<DeviceArray<char>>(poison);
        transfer.outgoing = outgoing_->data();
        transfer.incoming = incoming_->data();
        return transfer;
    }

private:
    int rank_;
    DeviceArray<Send> sends_;
    DeviceArray<Receive> receives_;
    DeviceArray<Control> control_;
    std::unique_ptr<DeviceArray<char>> outgoing_, incoming_;
};

// What NCCL does.
void exchange(const Transfer (&transfers)[kRanks]) {
    const int64_t bytes = transfers[0].pair_bytes;
    for (int from = 0; from < kRanks; ++from)
        must(cudaMemcpy(transfers[1 - from].incoming + from * bytes, transfers[from].outgoing + (1 - from) * bytes,
                        bytes, cudaMemcpyDeviceToDevice),
             "exchanging pair buffers");
}

template <typename T> Arrays<T> poisoned(int rows) {
    Arrays<T> arrays;
    for (const int width : kWidths) {
        std::vector<T> numbers(size_t{kGroups} * rows * width);
        std::fill_n(reinterpret_cast<char*>(numbers.data()), numbers.size() * sizeof(T), kPoison);
        arrays.push_back(std::make_unique<DeviceArray<T>>(numbers));
    }
    return arrays;
}

template <typename T> Arrays<T> on_device(const std::vector<std::vector<T>>& numbers) {
    Arrays<T> arrays;
    for (const auto& array : numbers)
        arrays.push_back(std::make_unique<DeviceArray<T>>(array));
    return arrays;
}

template <typename T> std::vector<std::vector<T>> small_numbers(int rows, std::mt19937& random) {
    std::vector<std::vector<T>> arrays;
    for (const int width : kWidths)
        for (T& x : arrays.emplace_back(size_t{kGroups} * rows * width))
            x = static_cast<T>(static_cast<float>(static_cast<int>(random() % 9) - 4));
    return arrays;
}

// Calls visit(rank, place, rank, place) for the numbers of an array's rows: where they are, and where they go.
template <typename Visit> void for_ways(const Tables& tables, int array, Visit visit) {
    for (const Way& way : tables.ways) {
        const size_t input = (size_t{1} * way.group * kInputRows + way.row) * kWidths[array];
        const size_t output = (size_t{1} * way.group * kOutputRows + way.peer_row) * kWidths[array];
        for (int i = 0; i < kWidths[array]; ++i)
            visit(way.from, input + i, way.to, output + i);
    }
}

template <typename T> std::vector<double> widened(const std::vector<T>& numbers) {
    std::vector<double> wide(numbers.size());
    std::ranges::transform(numbers, wide.begin(), to_double<T>);
    return wide;
}

template <typename T>
void check_cast(const std::string& name, const Tables& tables, Rank (&ranks)[kRanks], Verdict& verdict) {
    std::mt19937 random(1);
    std::vector<std::vector<T>> numbers[kRanks];
    Arrays<T> from[kRanks], to[kRanks];
    Transfer transfers[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
        numbers[rank] = small_numbers<T>(kInputRows, random);
        from[rank] = on_device(numbers[rank]);
        to[rank] = poisoned<T>(kOutputRows);
        transfers[rank] = ranks[rank].call(from[rank], to[rank], true);
        must(push_rows(transfers[rank], kStream, nullptr), "pushing rows");
    }
    exchange(transfers);
    for (const Transfer& transfer : transfers)
        must(fill_rows(transfer, kStream), "filling rows");
    for (int array = 0; array < kArrays; ++array) {
        std::vector<double> want[kRanks];
        for (auto& rows : want)
            rows.resize(size_t{kGroups} * kOutputRows * kWidths[array]);
        for_ways(tables, array, [&](int source, size_t input, int rank, size_t output) {
            want[rank][output] = to_double(numbers[source][array][input]);
        });
        for (int rank = 0; rank < kRanks; ++rank)
            verdict.compare("cast " + name, widened(to[rank][array]->to_host()), want[rank], 0);
    }
}

template <typename T, typename Sum>
void check_reduction(const std::string& name, const Tables& tables, Rank (&ranks)[kRanks], Verdict& verdict) {
    std::mt19937 random(2);
    std::vector<std::vector<T>> numbers[kRanks];
    Arrays<T> from[kRanks];
    Arrays<Sum> to[kRanks];
    Transfer transfers[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
        numbers[rank] = small_numbers<T>(kOutputRows, random);
        from[rank] = on_device(numbers[rank]);
        to[rank] = poisoned<Sum>(kInputRows);
        transfers[rank] = ranks[rank].call(from[rank], to[rank], false);
        must(pack_partials(transfers[rank], kStream), "packing rows");
    }
    exchange(transfers);
    for (const Transfer& transfer : transfers)
        must(pull_sums(transfer, kStream, nullptr), "adding up rows");
    for (int array = 0; array < kArrays; ++array) {
        std::vector<double> want[kRanks];
        for (auto& rows : want)
            rows.resize(size_t{kGroups} * kInputRows * kWidths[array]);
        for_ways(tables, array, [&](int rank, size_t input, int source, size_t output) {
            want[rank][input] += to_double(numbers[source][array][output]);
        });
        for (int rank = 0; rank < kRanks; ++rank)
            verdict.compare("reduction " + name, widened(to[rank][array]->to_host()), want[rank], 0);
    }
}

int run() {
    std::mt19937 random(0);
    Tables tables;
    for (int group = 0; group < kGroups; ++group)
        add_group(tables, group, random);
    for (const auto preload : {preload_push, preload_pair_rows, preload_pull})
        must(preload(), "loading the kernels");
    Rank ranks[kRanks] = {{0, tables}, {1, tables}};
    Verdict verdict;
    check_cast<__nv_bfloat16>("bf16", tables, ranks, verdict);
    check_cast<double>("f64", tables, ranks, verdict);
    check_reduction<__nv_bfloat16, __nv_bfloat16>("bf16", tables, ranks, verdict);
    check_reduction<__nv_bfloat16, float>("bf16 to f32", tables, ranks, verdict);
    check_reduction<__half, __half>("f16", tables, ranks, verdict);
    check_reduction<__half, float>("f16 to f32", tables, ranks, verdict);
    check_reduction<float, float>("f32", tables, ranks, verdict);
    check_reduction<double, double>("f64", tables, ranks, verdict);
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
