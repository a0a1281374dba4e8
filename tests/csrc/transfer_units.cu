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

constexpr int kSteps = 2000, kPrograms = 2;
constexpr int kLongestMicroseconds = 200;

enum Kind { kBefore, kTransfer, kSide, kAfter, kKinds };

// The order in which kernels ran, as kKinds * transfer + kind: transfers, parts of them that run beside the rest, and what
// programs run before and after them.
struct Log {
    int count;
    int entries[kKinds * kSteps];
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

// Runs transfers of random lengths, some of which have a part beside the rest, by programs in two streams.
class Fuzz {
public:
    Fuzz() : log_({Log{}}) {
        for (cudaStream_t& program : programs_)
            must(cudaStreamCreateWithFlags(&program, cudaStreamNonBlocking), "making a stream");
        order_.create();
    }

    void step() {
        const cudaStream_t program = programs_[draw(kPrograms)];
        run(program, kBefore);
        order_.begin(program);
        if (draw(2) == 0) {
            const cudaStream_t side = order_.fork(program);
            run(program, kTransfer);
            run(side, kSide);
            order_.join(program);
        } else {
            run(program, kTransfer);
        }
        order_.end(program);
        run(program, kAfter);
        ++transfers_;
    }

    void check(Verdict& verdict) {
        must(cudaDeviceSynchronize(), "running");
        const Log log = log_.to_host()[0];
        std::vector<bool> has_run(kKinds * transfers_);
        bool in_turn = true, in_order = true;
        for (int i = 0; i < log.count; ++i) {
            const int transfer = log.entries[i] / kKinds, kind = log.entries[i] % kKinds;
            const auto has = [&](int other, Kind of_kind) { return has_run[kKinds * other + of_kind]; };
            if (kind == kTransfer or kind == kSide) {
                in_turn = in_turn and (transfer == 0 or has(transfer - 1, kTransfer));
                in_order = in_order and has(transfer, kBefore) and not has(transfer, kAfter);
            }
            in_order = in_order and (kind != kAfter or has(transfer, kTransfer));
            has_run[log.entries[i]] = true;
        }
        verdict.expect("all ran", log.count == launched_);
        verdict.expect("transfers one after another", in_turn);
        verdict.expect("after what the program had, and before what it has next", in_order);
        order_.destroy();
    }

private:
    int draw(int count) { return static_cast<int>(random_() % count); }

    void run(cudaStream_t stream, Kind kind) {
        const int microseconds = kind == kAfter ? 0 : draw(kLongestMicroseconds);
        ++launched_;
        append<<<1, 1, 0, stream>>>(log_.data(), kKinds * transfers_ + kind, microseconds);
        must(cudaGetLastError(), "launching");
    }

    std::mt19937 random_{0};
    cudaStream_t programs_[kPrograms];
    TransferOrder order_;
    DeviceArray<Log> log_;
    int transfers_ = 0, launched_ = 0;
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
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main(int argc, char** argv) {
    return jaxmagi::test::run(argc > 1 ? argv[1] : nullptr);
}
