#pragma once

#include <cstdint>
#include <functional>

namespace jaxmagi {

// A pool of threads. `schedule` runs a task on one of them at some time, or itself if there are none. It may throw, in
// which case there are fewer helpers.
struct Scheduler {
    int num_threads;
    std::function<void(std::function<void()>)> schedule;
};

// Calls body(item, worker) once for every item of [0, num_items), items claimed in ascending order, and returns when
// all are done. worker < num_workers(scheduler, num_items) is different for threads that run at the same time.
// `body` must not throw. An item may wait for an item with a smaller number, which is running, and for nothing else.
//
// The calling thread claims items like every helper, and waits only for items that other threads already run. So
// nothing depends on a helper ever starting: the handlers of 8 host devices can be here at once on a pool of 2 threads,
// or on a pool whose threads are all blocked in a rendezvous, without deadlock. Helpers that start late find no item
// left and touch nothing but the shared counters.
void parallel_for(const Scheduler& scheduler, int64_t num_items, const std::function<void(int64_t, int)>& body);

int num_workers(const Scheduler& scheduler, int64_t num_items);

}  // namespace jaxmagi
