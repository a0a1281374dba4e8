#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <vector>

// Runs the transfers of a group one after another, in the order of their calls. An asynchronous transfer, during which
// the program computes, runs in the group's own stream. A synchronous one runs in the program's stream unless an
// asynchronous one is in flight, since events between streams take some microseconds.
//
// Transfers that are in flight at the same time are told apart by transfer ids, which the program chooses. If an id is
// used again before its first transfer has been waited for, `wait` waits for the later one as well.

namespace jaxmagi::collectives {

using Addresses = std::vector<const void*>;  // of a transfer's results

// For one host thread at a time, with the device current that was so in `create`. Programs have streams that live as
// long, as XLA's do. Failures throw.
class TransferOrder {
public:
    // Creates the group's streams with the highest priority: SMs that become free go to transfers before computations.
    void create();

    // The device must be idle.
    void destroy();

    // Before a program runs, for each of its transfers: creates the event of a transfer id, which takes the driver a
    // while. Returns the number of the execution, for `end_execution`.
    int64_t prepare(int64_t transfer_id, cudaStream_t program);

    // When the program has launched all that it ever will, and before its memory is reused: makes `program` wait for
    // what it has left in flight, for example after a failure, since nothing will `wait` for that. May run in any
    // thread and after the `prepare` of the next program, which has then done the same: XLA has one stream for the
    // programs of a device.
    void end_execution(int64_t execution, cudaStream_t program);

    // Returns the stream in which to launch a transfer. It waits for all that `program` has now, and for all transfers
    // so far.
    cudaStream_t begin(cudaStream_t program, bool is_async);

    // Ends a synchronous transfer that was launched in the stream of `begin`: `program` waits for it.
    void end_sync(cudaStream_t stream, cudaStream_t program);

    // Ends the launch of an asynchronous transfer with these results.
    void end_async(int64_t transfer_id, Addresses results);

    // Makes `program` wait for an asynchronous transfer. Throws if that has other results: then XLA has copied them
    // before they were complete, or the transfer belongs to another execution, which has ended.
    void wait(cudaStream_t program, int64_t transfer_id, const Addresses& results);

    // Makes `program` wait for the event `started`, which the transfer records when it has its SMs. Otherwise kernels
    // of the program that take all SMs would often start first, since it takes the group's stream some microseconds to
    // see the program's event.
    void wait_until_started(cudaStream_t program);

    // Lets a part of a transfer run beside the rest: `fork` returns another stream, which waits for what `stream` has
    // now, and `join` makes `stream` wait for what that has.
    cudaStream_t fork(cudaStream_t stream);
    void join(cudaStream_t stream);

    // Returns whether no asynchronous transfer is in flight.
    bool is_idle() const;

    // An event for `wait_until_started`, and one for the launch of a kernel that is a part of a transfer.
    cudaEvent_t started() const { return started_; }
    cudaEvent_t pushing() const { return pushing_; }

private:
    // The transfers of one id.
    struct Transfers {
        cudaEvent_t end;                 // of the last one
        std::list<Addresses> in_flight;  // results of those that nobody has waited for
    };

    void abandon_transfers(cudaStream_t program);

    // Makes `later` wait for all that `earlier` has now.
    void follow(cudaStream_t later, cudaStream_t earlier);

    // `end_execution` may run in another thread. It does nothing once the next program has called `prepare`; a program
    // that only waits does not call that, so that `wait` locks too.
    std::mutex mutex_;
    int64_t execution_ = 0;
    cudaStream_t stream_ = nullptr, side_stream_ = nullptr;
    cudaEvent_t order_event_ = nullptr, started_ = nullptr, pushing_ = nullptr;
    std::map<int64_t, Transfers> transfers_;  // by transfer id
    const Transfers* last_async_ = nullptr;   // with the newest transfer of all, if that is asynchronous
    cudaStream_t last_stream_ = nullptr;      // a stream that waits for all transfers so far, null before the first
};

}  // namespace jaxmagi::collectives
