#include "csrc/collectives/watchdog.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "csrc/common/check_cuda.h"

namespace jaxmagi::collectives {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPause{50};

// One exchange. The clock starts when the stream has come to it: what runs before may take as long as it likes.
struct Watched {
    int ordinal;  // of the device
    cudaEvent_t begin;
    std::optional<cudaEvent_t> end;  // none yet while NCCL has the host's thread
    std::chrono::milliseconds timeout;
    std::string who, what;
    std::optional<Clock::time_point> begun = std::nullopt;

    // An error is somebody else's to report: then there is nothing to wait for.
    bool is_over() const { return end and cudaEventQuery(*end) != cudaErrorNotReady; }
    bool has_begun() const { return cudaEventQuery(begin) != cudaErrorNotReady; }
};

[[noreturn]] void give_up(const Watched& watched) {
    std::fprintf(stderr,
                 "jaxmagi: %s waited for %lld ms until NCCL had %s; another rank has failed, or makes other calls. The "
                 "process ends, since NCCL would wait forever.\n",
                 watched.who.c_str(), static_cast<long long>(watched.timeout.count()), watched.what.c_str());
    std::abort();
}

class Watchdog {
public:
    Watchdog() { std::thread([this] { run(); }).detach(); }

    using Place = std::list<Watched>::iterator;

    Place add(Watched watched) {
        const std::lock_guard lock(mutex_);
        added_.notify_one();
        return watched_.insert(watched_.end(), std::move(watched));
    }

    void set_end(Place place, cudaEvent_t end) {
        const std::lock_guard lock(mutex_);
        place->end = end;
    }

    void forget(Place place) {
        const std::lock_guard lock(mutex_);
        cudaEventDestroy(place->begin);
        watched_.erase(place);
    }

private:
    void run() {
        for (;; std::this_thread::sleep_for(kPause)) {
            std::unique_lock lock(mutex_);
            added_.wait(lock, [this] { return not watched_.empty(); });
            for (auto each = watched_.begin(); each != watched_.end();)
                each = look_at(*each) ? watched_.erase(each) : std::next(each);
        }
    }

    // Whether it is over.
    static bool look_at(Watched& watched) {
        cudaSetDevice(watched.ordinal);  // else the thread would have the first device, and start it for nothing
        if (watched.is_over()) {
            cudaEventDestroy(watched.begin);
            cudaEventDestroy(*watched.end);
            return true;
        }
        if (not watched.begun and watched.has_begun())
            watched.begun = Clock::now();
        if (watched.begun and Clock::now() - *watched.begun > watched.timeout)
            give_up(watched);
        return false;
    }

    std::mutex mutex_;
    std::condition_variable added_;
    std::list<Watched> watched_;
};

cudaEvent_t record(cudaStream_t stream) {
    cudaEvent_t event;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    check_cuda(cudaEventRecord(event, stream), "recording an event");
    return event;
}

}  // namespace

void watch(cudaStream_t stream, uint64_t timeout_ms, std::string who, std::string what,
           const std::function<void()>& enqueue) {
    static auto* const watchdog = new Watchdog;  // never destroyed: its thread runs until the process ends
    // NCCL may wait for the others while it enqueues: that counts, too.
    const auto place = watchdog->add({.ordinal = current_ordinal(),
                                      .begin = record(stream),
                                      .end = std::nullopt,
                                      .timeout = std::chrono::milliseconds(timeout_ms),
                                      .who = std::move(who),
                                      .what = std::move(what)});
    try {
        enqueue();
        watchdog->set_end(place, record(stream));
    } catch (...) {
        watchdog->forget(place);
        throw;
    }
}

}  // namespace jaxmagi::collectives
