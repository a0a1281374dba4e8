#pragma once

#include <cstdint>
#include <functional>

namespace jaxmagi {

// A pool that may run a task on another thread, now, later or (when it has no threads) before `schedule` returns.
// `schedule` may throw: then there are fewer helpers.
struct Scheduler {
    int num_threads;
    std::function<void(std::function<void()>)> schedule;
};

// Calls body(item, worker) once for every item of [0, num_items), items claimed in ascending order, and returns when
// all are done. worker < num_workers(scheduler, num_items) tells the threads that run at the same time apart.
//
// NOTES: the calling thread claims items like every helper until none is left, and only then waits for items that
// other threads already run. So nothing depends on a scheduled helper ever starting: handlers of 8 host devices
// can be here at once on a pool of 2 threads, or on a pool whose threads all sit in a rendezvous, without deadlock.
// Helpers that start late find no item left and touch nothing but the shared counters. `body` must not throw; an
// item may wait for an item with a smaller number (that one has been claimed, so it is running), for nothing else.
void parallel_for(const Scheduler& scheduler, int64_t num_items, const std::function<void(int64_t, int)>& body);

int num_workers(const Scheduler& scheduler, int64_t num_items);

}  // namespace jaxmagi
