// The order of transfers among streams, and the end of a process that waits for others for too long, without XLA and
// NCCL. With an argument, waits on the host as NCCL's set-up does for a rank that never comes.

#include <chrono>
#include <stdexcept>
#include <thread>

#include "csrc/collectives/transfer_order.h"
#include "csrc/collectives/watchdog.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

constexpr int kSteps = 2000, kNumbers = 3, kPrograms = 2, kMostUnderWay = 4;
constexpr int kLongestMicroseconds = 200;

enum Kind { kBefore, kTransfer, kBehind, kKinds };

// What ran, in its order, as kKinds * transfer + kind: transfers, and what their programs have before and behind them.
struct Log {
    int count;
    int entries[kKinds * (kSteps + 6)];
};

__device__ void pass(int microseconds) {
    const long long begin = clock64();
    while (clock64() - begin < 1500LL * microseconds) {
    }
}

__global__ void take(int microseconds) {
    pass(microseconds);
}

__global__ void append(Log* log, int entry, int microseconds) {
    pass(microseconds);
    log->entries[atomicAdd(&log->count, 1)] = entry;
}

struct UnderWay {
    int transfer;
    int64_t number;
    Places results;
};

// Random transfers of random lengths, at once and apart, by programs in two streams.
class Fuzz {
public:
    Fuzz() : log_({Log{}}) {
        for (cudaStream_t& program : programs_)
            must(cudaStreamCreateWithFlags(&program, cudaStreamNonBlocking), "making a stream");
        order_.create();
        for (int number = 0; number < kNumbers; ++number)
            order_.prepare(number, programs_[0]);
    }

    void step() {
        const cudaStream_t program = programs_[draw(kPrograms)];
        const int kind = draw(8);
        if (kind < 2)
            at_once(program);
        else if (kind == 2)
            fail(program);
        else if (kind < 6 and under_way_.size() < kMostUnderWay)
            start(program);
        else if (not under_way_.empty())
            done(program);
    }

    void check(Verdict& verdict) {
        while (not under_way_.empty())
            done(programs_[0]);
        must(cudaDeviceSynchronize(), "running");
        const Log log = log_.to_host()[0];
        std::vector<int> ran(transfers_);  // kinds so far
        bool in_turn = true, in_order = true;
        int next = 0;
        for (int i = 0; i < log.count; ++i) {
            const int transfer = log.entries[i] / kKinds, kind = log.entries[i] % kKinds;
            in_order = in_order and ran[transfer]++ == kind;
            in_turn = in_turn and (kind != kTransfer or next++ == transfer);
        }
        verdict.expect("all ran", log.count == launched_ and next == transfers_);
        verdict.expect("transfers one after another", in_turn);
        verdict.expect("behind what the program had, and before what it has next", in_order);
        verdict.expect("at once in the program's stream where no other is under way", in_right_stream_);
    }

    // What a program that failed has left under way, and ends that are not those of a start.
    void check_misuse(Verdict& verdict) {
        const int64_t execution = order_.prepare(0, programs_[0]);
        start(programs_[0]);
        order_.end(execution, programs_[0]);
        forget(programs_[0]);
        start(programs_[0]);
        const int64_t next = order_.prepare(0, programs_[1]);
        forget(programs_[1]);
        start(programs_[0]);
        order_.end(execution, programs_[1]);
        done(programs_[0]);
        order_.end(next, programs_[1]);
        for (const cudaStream_t program : programs_)
            at_once(program);
        start(programs_[0]);
        bool has_thrown = false;
        try {
            order_.join(programs_[0], under_way_[0].number, {&log_});
        } catch (const std::runtime_error&) {
            has_thrown = true;
        }
        verdict.expect("results in other places are an error", has_thrown);
        check(verdict);
        order_.destroy();
    }

private:
    int draw(int count) { return static_cast<int>(random_() % count); }

    void run(cudaStream_t stream, int transfer, Kind kind) {
        const int microseconds = kind == kBehind ? 0 : draw(kLongestMicroseconds);
        ++launched_;
        append<<<1, 1, 0, stream>>>(log_.data(), kKinds * transfer + kind, microseconds);
        must(cudaGetLastError(), "launching");
    }

    void at_once(cudaStream_t program) {
        run(program, transfers_, kBefore);
        const cudaStream_t stream = order_.enter(program, false);
        in_right_stream_ = in_right_stream_ and (stream == program) == under_way_.empty();
        run(stream, transfers_, kTransfer);
        order_.finish(stream, program);
        run(program, transfers_++, kBehind);
    }

    void start(cudaStream_t program) {
        run(program, transfers_, kBefore);
        const cudaStream_t stream = order_.enter(program, true);
        run(stream, transfers_, kTransfer);
        const int64_t number = draw(kNumbers);
        const Places results = {&places_[transfers_]};
        order_.record(number, results);
        under_way_.push_back({transfers_++, number, results});
    }

    // A launch that ends in an exception, with something launched nevertheless.
    void fail(cudaStream_t program) {
        run(program, transfers_, kBefore);
        const cudaStream_t stream = order_.enter(program, true);
        run(stream, transfers_, kTransfer);
        order_.finish(stream, program);
        run(program, transfers_++, kBehind);
    }

    // What has been started is done, but nobody says so.
    void forget(cudaStream_t program) {
        run(program, under_way_[0].transfer, kBehind);
        under_way_.clear();
    }

    void done(cudaStream_t program) {
        const auto one = under_way_.begin() + draw(static_cast<int>(under_way_.size()));
        order_.join(program, one->number, one->results);
        run(program, one->transfer, kBehind);
        under_way_.erase(one);
    }

    std::mt19937 random_{0};
    cudaStream_t programs_[kPrograms];
    TransferOrder order_;
    DeviceArray<Log> log_;
    std::vector<UnderWay> under_way_;
    int transfers_ = 0, launched_ = 0;
    bool in_right_stream_ = true;
    char places_[kSteps + 6] = {};
};

void watch_something(const std::function<void()>& enqueue) {
    watch(nullptr, 200, "rank 0 of 2", "come together", enqueue);
}

// The process lives on.
void check_watches_that_end(Verdict& verdict) {
    take<<<1, 1>>>(500'000);  // what runs before may take as long as it likes
    watch_something([] {});
    bool has_thrown = false;
    try {
        watch_something([] { throw std::runtime_error("failed"); });
    } catch (const std::runtime_error&) {
        has_thrown = true;
    }
    std::this_thread::sleep_for(std::chrono::seconds(1));
    verdict.expect("exchanges that end are watched no more", has_thrown);
}

int run(bool is_rank_absent) {
    if (is_rank_absent)
        watch_something([] { std::this_thread::sleep_for(std::chrono::minutes(1)); });
    Verdict verdict;
    check_watches_that_end(verdict);
    Fuzz fuzz;
    for (int i = 0; i < kSteps; ++i)
        fuzz.step();
    fuzz.check(verdict);
    fuzz.check_misuse(verdict);
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main(int argc, char**) {
    return jaxmagi::test::run(argc > 1);
}
