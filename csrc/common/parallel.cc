#include "csrc/common/parallel.h"

#include <algorithm>
#include <atomic>
#include <memory>

namespace jaxmagi {
namespace {

struct Job {
    int64_t num_items;
    const std::function<void(int64_t, int)>* body;  // lives in the caller's frame: valid while items are left
    std::atomic<int64_t> next = 0;
    std::atomic<int64_t> done = 0;
};

void take_items(Job& job, int worker) {
    for (int64_t item = job.next++; item < job.num_items; item = job.next++) {
        (*job.body)(item, worker);
        if (++job.done == job.num_items)
            job.done.notify_all();
    }
}

}  // namespace

int num_workers(const Scheduler& scheduler, int64_t num_items) {
    return static_cast<int>(std::clamp<int64_t>(num_items, 1, std::max(1, scheduler.num_threads)));
}

void parallel_for(const Scheduler& scheduler, int64_t num_items, const std::function<void(int64_t, int)>& body) {
    const auto job = std::make_shared<Job>(num_items, &body);
    try {
        for (int worker = 1; worker < num_workers(scheduler, num_items); ++worker)
            scheduler.schedule([job, worker] { take_items(*job, worker); });
    } catch (...) {
        // Out of memory. Helpers that are already queued use `body`, so this call must not end before the items do.
    }
    take_items(*job, 0);
    for (int64_t done = job->done; done != num_items; done = job->done)
        job->done.wait(done);
}

}  // namespace jaxmagi
