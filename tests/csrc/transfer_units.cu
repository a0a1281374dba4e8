// Tests the order of transfers among streams, and that the watchdog ends a process, without XLA and NCCL. With an
// argument, waits on the host as NCCL does while it connects to a rank that never comes; the argument is the kind of
// reason.

#include <chrono>
#include <stdexcept>
#include <thread>

#include "csrc/collectives/nccl_watchdog.h"
#include "csrc/collectives/transfer_order.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

constexpr int kSteps = 2000, kIds = 3, kPrograms = 2, kMaxInFlight = 4;
constexpr int kLongestMicroseconds = 200;

enum Kind { kBefore, kTransfer, kAfter, kKinds };

// The order in which kernels ran, as kKinds * transfer + kind: transfers, and what programs run before and after them.
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

struct InFlight {
    int transfer;
    int64_t id;
    Addresses results;
};

// Runs random transfers of random lengths, synchronous and asynchronous, by programs in two streams.
class Fuzz {
public:
    Fuzz() : log_({Log{}}) {
        for (cudaStream_t& program : programs_)
            must(cudaStreamCreateWithFlags(&program, cudaStreamNonBlocking), "making a stream");
        order_.create();
        for (int id = 0; id < kIds; ++id)
            order_.prepare(id, programs_[0]);
    }

    void step() {
        const cudaStream_t program = programs_[draw(kPrograms)];
        const int kind = draw(8);
        if (kind < 2)
            run_sync(program);
        else if (kind == 2)
            fail(program);
        else if (kind < 6 and in_flight_.size() < kMaxInFlight)
            start(program);
        else if (not in_flight_.empty())
            done(program);
    }

    void check(Verdict& verdict) {
        while (not in_flight_.empty())
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
        verdict.expect("after what the program had, and before what it has next", in_order);
        verdict.expect("synchronous in the program's stream where none is in flight", in_right_stream_);
    }

    // Tests transfers that a failed program has left in flight, and a wait for other results than those of the start.
    void check_misuse(Verdict& verdict) {
        const int64_t execution = order_.prepare(0, programs_[0]);
        start(programs_[0]);
        order_.end_execution(execution, programs_[0]);
        forget(programs_[0]);
        start(programs_[0]);
        const int64_t next = order_.prepare(0, programs_[1]);
        forget(programs_[1]);
        start(programs_[0]);
        order_.end_execution(execution, programs_[1]);
        done(programs_[0]);
        order_.end_execution(next, programs_[1]);
        for (const cudaStream_t program : programs_)
            run_sync(program);
        start(programs_[0]);
        bool has_thrown = false;
        try {
            order_.wait(programs_[0], in_flight_[0].id, {&log_});
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
        const int microseconds = kind == kAfter ? 0 : draw(kLongestMicroseconds);
        ++launched_;
        append<<<1, 1, 0, stream>>>(log_.data(), kKinds * transfer + kind, microseconds);
        must(cudaGetLastError(), "launching");
    }

    // Launches what comes before a transfer, and the transfer, whose stream it returns.
    cudaStream_t launch(cudaStream_t program, bool is_async) {
        run(program, transfers_, kBefore);
        const cudaStream_t stream = order_.begin(program, is_async);
        run(stream, transfers_, kTransfer);
        return stream;
    }

    void end_sync(cudaStream_t stream, cudaStream_t program) {
        order_.end_sync(stream, program);
        run(program, transfers_++, kAfter);
    }

    void run_sync(cudaStream_t program) {
        const cudaStream_t stream = launch(program, false);
        in_right_stream_ = in_right_stream_ and (stream == program) == in_flight_.empty();
        end_sync(stream, program);
    }

    // The launch of an asynchronous transfer ends in an exception, but something has been launched.
    void fail(cudaStream_t program) { end_sync(launch(program, true), program); }

    void start(cudaStream_t program) {
        launch(program, true);
        const int64_t id = draw(kIds);
        const Addresses results = {&results_[transfers_]};
        order_.end_async(id, results);
        in_flight_.push_back({transfers_++, id, results});
    }

    // The transfer in flight completes, but nobody waits for it.
    void forget(cudaStream_t program) {
        run(program, in_flight_[0].transfer, kAfter);
        in_flight_.clear();
    }

    void done(cudaStream_t program) {
        const auto one = in_flight_.begin() + draw(static_cast<int>(in_flight_.size()));
        order_.wait(program, one->id, one->results);
        run(program, one->transfer, kAfter);
        in_flight_.erase(one);
    }

    std::mt19937 random_{0};
    cudaStream_t programs_[kPrograms];
    TransferOrder order_;
    DeviceArray<Log> log_;
    std::vector<InFlight> in_flight_;
    int transfers_ = 0, launched_ = 0;
    bool in_right_stream_ = true;
    char results_[kSteps + 6] = {};
};

void watch(const std::function<void()>& enqueue, std::function<std::string()> find_reason = {}) {
    enqueue_nccl(nullptr, 200, {"rank 0 of 2", "come together", std::move(find_reason)}, enqueue);
}

// The process lives on.
void check_operations_that_end(Verdict& verdict) {
    take<<<1, 1>>>(500'000);  // what runs before may take as long as it likes
    watch([] {});
    bool has_thrown = false;
    try {
        watch([] { throw std::runtime_error("failed"); });
    } catch (const std::runtime_error&) {
        has_thrown = true;
    }
    std::this_thread::sleep_for(std::chrono::seconds(1));
    verdict.expect("operations that have ended are not watched", has_thrown);
}

// Waits for a rank that never comes, with a reason that is found, that takes too long, or that cannot be found.
void wait_for_absent_rank(const std::string& reason) {
    const auto wait = [] { std::this_thread::sleep_for(std::chrono::minutes(1)); };
    watch(wait, [&]() -> std::string {
        if (reason == "slow")
            wait();
        if (reason == "failing")
            throw std::runtime_error("failed");
        return "rank 1 is late";
    });
}

int run(const char* reason) {
    if (reason != nullptr)
        wait_for_absent_rank(reason);
    Verdict verdict;
    check_operations_that_end(verdict);
    Fuzz fuzz;
    for (int i = 0; i < kSteps; ++i)
        fuzz.step();
    fuzz.check(verdict);
    fuzz.check_misuse(verdict);
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main(int argc, char** argv) {
    return jaxmagi::test::run(argc > 1 ? argv[1] : nullptr);
}
