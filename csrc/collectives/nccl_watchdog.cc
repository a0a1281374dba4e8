#include "csrc/collectives/nccl_watchdog.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "csrc/common/check_cuda.h"

namespace jaxmagi::collectives {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPollInterval{50};
constexpr std::chrono::seconds kMostTimeForReason{1};
// From the time limit to the end of the process, by which JAX ends other ranks too: they print first, what they wait
// for, although they may have begun later and take longer to find a reason.
constexpr std::chrono::seconds kLastWords{2};

// Returns the reason, or an empty text if it cannot be told in time: the device may answer no more.
std::string find_in_time(const std::function<std::string()>& find_reason) {
    if (not find_reason)
        return {};
    const auto found = std::make_shared<std::promise<std::string>>();
    std::future<std::string> reason = found->get_future();
    try {
        std::thread([found, find_reason] {
            try {
                found->set_value(find_reason());
            } catch (const std::exception&) {  // the device has an error, which others report
                found->set_value({});
            }
        }).detach();
    } catch (const std::system_error&) {  // there can be no more threads
        return {};
    }
    return reason.wait_for(kMostTimeForReason) == std::future_status::ready ? reason.get() : std::string();
}

struct Operation {
    int ordinal;  // of the device
    cudaEvent_t begin;
    std::chrono::milliseconds timeout;
    NcclText text;
    std::optional<cudaEvent_t> end = {};          // unset while NCCL has the host's thread
    std::optional<Clock::time_point> begun = {};  // when the stream was first seen to have come to it
    bool is_reported = false;

    // An error counts as the end, since others report it.
    bool has_ended() const { return not is_reported and end and cudaEventQuery(*end) != cudaErrorNotReady; }

    // Starts the clock when the stream comes to the operation: what runs before may take as long as it likes.
    void check_timeout() {
        if (not begun and cudaEventQuery(begin) != cudaErrorNotReady)
            begun = Clock::now();
        if (not begun or Clock::now() - *begun <= timeout)
            return;
        if (not is_reported)
            report();
        if (is_reported and Clock::now() - *begun > timeout + kLastWords)
            std::abort();
    }

private:
    void report() {
        const std::string reason = find_in_time(text.find_reason);
        if (has_ended())  // meanwhile
            return;
        is_reported = true;
        std::fprintf(stderr,
                     "jaxmagi: %s waited for %lld ms until NCCL had %s; %sanother rank has failed, or makes other "
                     "calls. The process ends, since NCCL would wait forever.\n",
                     text.who.c_str(), static_cast<long long>(timeout.count()), text.what.c_str(),
                     reason.empty() ? "" : (reason + "; ").c_str());
    }
};

class Watchdog {
public:
    using Iterator = std::list<Operation>::iterator;

    Watchdog() { std::thread([this] { run(); }).detach(); }

    Iterator add(Operation operation) {
        const std::lock_guard lock(mutex_);
        added_.notify_one();
        return operations_.insert(operations_.end(), std::move(operation));
    }

    void set_end(Iterator operation, cudaEvent_t end) {
        const std::lock_guard lock(mutex_);
        operation->end = end;
    }

    void remove(Iterator operation) {
        const std::lock_guard lock(mutex_);
        cudaEventDestroy(operation->begin);
        operations_.erase(operation);
    }

private:
    void run() {
        for (;; std::this_thread::sleep_for(kPollInterval)) {
            std::unique_lock lock(mutex_);
            added_.wait(lock, [this] { return not operations_.empty(); });
            std::erase_if(operations_, poll);
        }
    }

    // Returns whether an operation has ended, and then destroys its events.
    static bool poll(Operation& operation) {
        cudaSetDevice(operation.ordinal);  // or the thread would initialize the first device for nothing
        if (operation.has_ended()) {
            cudaEventDestroy(operation.begin);
            cudaEventDestroy(*operation.end);
            return true;
        }
        operation.check_timeout();
        return false;
    }

    std::mutex mutex_;
    std::condition_variable added_;
    std::list<Operation> operations_;
};

cudaEvent_t record(cudaStream_t stream) {
    cudaEvent_t event;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    check_cuda(cudaEventRecord(event, stream), "recording an event");
    return event;
}

}  // namespace

void enqueue_nccl(cudaStream_t stream, uint64_t timeout_ms, NcclText text, const std::function<void()>& enqueue) {
    static auto* const watchdog = new Watchdog;  // never destroyed: its thread runs until the process ends
    // The time that NCCL waits for other ranks while it enqueues counts, too.
    const auto operation = watchdog->add({.ordinal = current_ordinal(),
                                          .begin = record(stream),
                                          .timeout = std::chrono::milliseconds(timeout_ms),
                                          .text = std::move(text)});
    try {
        enqueue();
        watchdog->set_end(operation, record(stream));
    } catch (...) {
        watchdog->remove(operation);
        throw;
    }
}

}  // namespace jaxmagi::collectives
