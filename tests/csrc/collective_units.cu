// Compares the kernels of the collectives with the host, without XLA and NCCL. Two ranks take turns on one GPU: each is
// native only to itself, and the messages between them are copied as NCCL would move them. The numbers are small
// integers, so that sums are exact in any order.

#include <algorithm>
#include <memory>

#include "csrc/collectives/remote_rows.h"
#include "csrc/collectives/transfer_params.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

constexpr int kRanks = 2, kBatch = 3, kEntries = 1600, kInputRows = 3200, kOutputRows = 3000, kPairRows = 2000;
constexpr int kSendingRows = 150;     // at either end of the input: so few that chunks there must be split
constexpr int kIdleTransfer = 1;      // of the batch: nobody sends anything
constexpr int kWidths[] = {16, 520};  // numbers in a row of each array
constexpr int kArrays = std::size(kWidths);
constexpr int kPitch = 3, kPart = 1;  // of arrays whose rows lie apart
constexpr char kPoison = -1;          // NaN in all types
const cudaStream_t kStream = cudaStreamPerThread;  // synchronizes with cudaMemcpy

template <typename T> constexpr DType kDType = DType::kF32;
template <> constexpr DType kDType<__nv_bfloat16> = DType::kBF16;
template <> constexpr DType kDType<__half> = DType::kF16;
template <> constexpr DType kDType<double> = DType::kF64;

template <typename T> double to_double(T x) {
    return static_cast<double>(static_cast<float>(x));
}

// An input row of one rank, and the output row of another that receives it.
struct Route {
    int index, from, row, to, peer_row;
};

struct Tables {
    std::vector<Send> sends[kRanks];  // [batch, entries], as the kernels take them
    std::vector<Receive> receives[kRanks];
    std::vector<Route> routes;
};

// Adds runs of random lengths from random rows, with gaps between them.
void add_transfer(Tables& tables, int index, std::mt19937& random) {
    const auto draw = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    std::vector<Send> sends[kRanks];
    int slots[kRanks][kRanks] = {};
    for (int to = 0; to < kRanks; ++to) {
        std::vector<Receive> receives;
        const size_t most = index == kIdleTransfer ? 0 : kEntries / kRanks;
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
                tables.routes.push_back({index, from, from_row + i, to, row + i});
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

// A rank with its tables, control block and messages.
class Rank {
public:
    Rank(int rank, const Tables& tables)
        : rank_(rank), sends_(tables.sends[rank]), receives_(tables.receives[rank]), control_({ControlBlock{}}) {}

    template <typename T, typename Sum>
    TransferParams params(const Arrays<T>& from, const Arrays<Sum>& to, bool is_cast) {
        TransferParams params{.kind = is_cast ? Kind::kCast : Kind::kReduce,
                              .rank = rank_,
                              .size = kRanks,
                              .slot = rank_,
                              .num_slots = kRanks,
                              .ranks = {0, 1},
                              .native = uint64_t{1} << rank_,
                              .sends = sends_.data(),
                              .receives = receives_.data(),
                              .batch = kBatch,
                              .entries = kEntries,
                              .input_rows = kInputRows,
                              .output_rows = kOutputRows,
                              .pair_rows = kPairRows,
                              .input_stride = kInputRows,
                              .input_pitch = 1,
                              .num_arrays = kArrays,
                              .dtype = kDType<T>,
                              .sum_dtype = kDType<Sum>,
                              .call_hash = 1234,
                              .timeout_ns = 60'000'000'000,
                              .num_sms = 7};
        params.controls[rank_] = control_.data();
        for (int i = 0; i < kArrays; ++i) {
            params.arrays[i] = {.from = reinterpret_cast<const char*>(from[i]->data()),
                                .to = reinterpret_cast<char*>(to[i]->data()),
                                .row_bytes = kWidths[i] * static_cast<int>(sizeof(T))};
            params.published[i] = reinterpret_cast<uint64_t>(is_cast ? params.arrays[i].to : params.arrays[i].from);
        }
        return params;
    }

    RemoteRows remote_rows(const TransferParams& params) {
        const auto allocate = [&](size_t bytes) {
            memory_ = std::make_unique<DeviceArray<char>>(std::vector<char>(bytes, kPoison));
            return memory_->data();
        };
        const auto is_remote = [&](int peer) { return peer != rank_; };
        return {params, {"a test", is_remote, [](int) { return "a rank"; }, allocate}, kStream};
    }

private:
    int rank_;
    DeviceArray<Send> sends_;
    DeviceArray<Receive> receives_;
    DeviceArray<ControlBlock> control_;
    std::unique_ptr<DeviceArray<char>> memory_;
};

// Moves messages as NCCL does.
void exchange(const std::vector<RemoteRows>& rows) {
    for (int from = 0; from < kRanks; ++from) {
        const auto &sent = rows[from].outgoing().messages, &received = rows[1 - from].incoming().messages;
        if (sent.size() != received.size())
            must(cudaErrorInvalidValue, "matching messages");
        for (size_t i = 0; i < sent.size(); ++i) {
            if (sent[i].bytes != received[i].bytes)
                must(cudaErrorInvalidValue, "matching messages");
            must(cudaMemcpyAsync(rows[1 - from].incoming_data(received[i]), rows[from].outgoing_data(sent[i]),
                                 sent[i].bytes, cudaMemcpyDeviceToDevice, kStream),
                 "exchanging messages");
        }
    }
}

template <typename T> Arrays<T> on_device(const std::vector<std::vector<T>>& numbers) {
    Arrays<T> arrays;
    for (const auto& array : numbers)
        arrays.push_back(std::make_unique<DeviceArray<T>>(array));
    return arrays;
}

template <typename T> Arrays<T> poisoned(int rows) {
    std::vector<std::vector<T>> arrays;
    for (const int width : kWidths) {
        std::vector<T>& numbers = arrays.emplace_back(size_t{kBatch} * rows * width);
        std::fill_n(reinterpret_cast<char*>(numbers.data()), numbers.size() * sizeof(T), kPoison);
    }
    return on_device(arrays);
}

template <typename T> std::vector<std::vector<T>> small_numbers(int rows, std::mt19937& random) {
    std::vector<std::vector<T>> arrays;
    for (const int width : kWidths)
        for (T& x : arrays.emplace_back(size_t{kBatch} * rows * width))
            x = static_cast<T>(static_cast<float>(static_cast<int>(random() % 9) - 4));
    return arrays;
}

// Returns arrays whose rows have kPitch parts, of which the part kPart has these numbers.
template <typename T> Arrays<T> among_parts(const std::vector<std::vector<T>>& numbers) {
    std::vector<std::vector<T>> wide;
    for (int array = 0; array < kArrays; ++array) {
        const int width = kWidths[array];
        std::vector<T>& parts = wide.emplace_back(numbers[array].size() * kPitch);
        std::fill_n(reinterpret_cast<char*>(parts.data()), parts.size() * sizeof(T), kPoison);
        for (size_t row = 0; row < numbers[array].size() / width; ++row)
            std::copy_n(numbers[array].begin() + row * width, width, parts.begin() + (row * kPitch + kPart) * width);
    }
    return on_device(wide);
}

// Lets the kernel of a group cast read rows that lie apart.
template <typename T> TransferParams from_parts(TransferParams params, const Arrays<T>& wide) {
    params.input_pitch = kPitch;
    for (int i = 0; i < kArrays; ++i)
        params.arrays[i].from = reinterpret_cast<const char*>(wide[i]->data() + kPart * kWidths[i]);
    return params;
}

template <typename T> std::vector<double> widened(const std::vector<T>& numbers) {
    std::vector<double> wide(numbers.size());
    std::ranges::transform(numbers, wide.begin(), to_double<T>);
    return wide;
}

template <bool kIsCast, typename T, typename Sum = T>
void check(const std::string& name, const Tables& tables, Rank (&ranks)[kRanks], Verdict& verdict,
           bool lie_apart = false) {
    constexpr int kFromRows = kIsCast ? kInputRows : kOutputRows, kToRows = kIsCast ? kOutputRows : kInputRows;
    std::mt19937 random(1);
    std::vector<std::vector<T>> numbers[kRanks];
    Arrays<T> from[kRanks], wide[kRanks];
    Arrays<Sum> to[kRanks];
    TransferParams params[kRanks];
    std::vector<RemoteRows> rows;
    for (int rank = 0; rank < kRanks; ++rank) {
        numbers[rank] = small_numbers<T>(kFromRows, random);
        from[rank] = on_device(numbers[rank]);
        to[rank] = poisoned<Sum>(kToRows);
        params[rank] = ranks[rank].params(from[rank], to[rank], kIsCast);
        rows.push_back(ranks[rank].remote_rows(params[rank]));
        rows[rank].add_to(params[rank]);
        if (lie_apart)
            wide[rank] = among_parts(numbers[rank]);
        if (kIsCast)
            must(push_rows(lie_apart ? from_parts(params[rank], wide[rank]) : params[rank], kStream), "pushing");
        rows[rank].pack(kStream);
    }
    exchange(rows);
    for (int rank = 0; rank < kRanks; ++rank) {
        rows[rank].unpack(kStream);
        if (not kIsCast)
            must(pull_sums(params[rank], kStream), "summing");
    }
    for (int array = 0; array < kArrays; ++array) {
        const size_t width = kWidths[array];
        std::vector<double> want[kRanks];
        for (auto& rows : want)
            rows.resize(kBatch * kToRows * width);
        for (const Route& route : tables.routes) {
            const size_t input = (size_t{kInputRows} * route.index + route.row) * width;
            const size_t output = (size_t{kOutputRows} * route.index + route.peer_row) * width;
            for (size_t i = 0; i < width; ++i)
                if (kIsCast)
                    want[route.to][output + i] = to_double(numbers[route.from][array][input + i]);
                else
                    want[route.from][input + i] += to_double(numbers[route.to][array][output + i]);
        }
        for (int rank = 0; rank < kRanks; ++rank)
            verdict.compare((kIsCast ? "cast " : "reduction ") + name, widened(to[rank][array]->to_host()), want[rank],
                            0);
    }
}

int run() {
    std::mt19937 random(0);
    Tables tables;
    for (int index = 0; index < kBatch; ++index)
        add_transfer(tables, index, random);
    for (const auto preload : {preload_push, preload_pull, preload_remote_kernels})
        must(preload(), "loading the kernels");
    Rank ranks[kRanks] = {{0, tables}, {1, tables}};
    Verdict verdict;
    check<true, __nv_bfloat16>("bf16", tables, ranks, verdict);
    check<true, double>("f64", tables, ranks, verdict);
    check<true, __nv_bfloat16>("bf16, rows that lie apart", tables, ranks, verdict, true);
    check<true, double>("f64, rows that lie apart", tables, ranks, verdict, true);
    check<false, __nv_bfloat16>("bf16", tables, ranks, verdict);
    check<false, __nv_bfloat16, float>("bf16 to f32", tables, ranks, verdict);
    check<false, __half>("f16", tables, ranks, verdict);
    check<false, __half, float>("f16 to f32", tables, ranks, verdict);
    check<false, float>("f32", tables, ranks, verdict);
    check<false, double>("f64", tables, ranks, verdict);
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
