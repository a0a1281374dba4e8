#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <vector>

// The transfers of a group, one after another. Where the program computes beside one, it is in a stream of the group's
// own. One that the program waits for at once is in the program's stream, unless others are under way: events between
// streams take some microseconds.
//
// Those that are under way at once are told apart by numbers of the program's choice. A number that is used anew before
// its first transfer has been waited for does no harm but that `join` waits for the later one as well.

namespace jaxmagi::collectives {

// Where the arrays of a transfer lie.
using Places = std::vector<const void*>;

// For one host thread at a time, with the device current that was so in `create`, and programs in streams that live as
// long, as XLA's do. Failures throw.
class TransferOrder {
public:
    // Of the highest priority: where multiprocessors become free, transfers get them before computations.
    void create();

    // After the device has come to rest.
    void destroy();

    // Before a program begins, for each of its transfers: makes ready for one of this number, which takes the driver a
    // while the first time. Returns what its `end` takes.
    int64_t prepare(int64_t transfer, cudaStream_t program);

    // When the program has got all that it ever will, and before its memory goes to others. No program will `join` what
    // it has left under way, as when it has failed, so that all that `program` gets from now on comes after that. From
    // any thread, since it may come after the next program's `prepare`, which then has done the same: XLA has one
    // stream for the programs of a device.
    void end(int64_t execution, cudaStream_t program);

    // The stream to launch a transfer in, behind all that `program` has now and all transfers so far. `is_apart`: the
    // program does not wait for it at once.
    cudaStream_t enter(cudaStream_t program, bool is_apart);

    // What was launched in the `stream` that was entered is a transfer; what `program` gets from now on comes after it.
    void finish(cudaStream_t stream, cudaStream_t program);

    // What was launched since `enter` is a transfer apart, with results in these places.
    void record(int64_t transfer, Places results);

    // What `program` gets from now on comes after the transfer. Throws if that has no results in these places: then XLA
    // has copied them before they were complete, or the transfer began in another program, and its `end` came before.
    void join(cudaStream_t program, int64_t transfer, const Places& results);

    // What `program` gets from now on comes after `begun`, which the transfer records when it has its multiprocessors.
    // Else kernels of the program that take all of them would often be faster: it takes this stream some microseconds
    // to hear of the program's event.
    void let_begin(cudaStream_t program);

    // What `program` gets from now on comes after the transfer, which `join` is to end nevertheless.
    void let_end(cudaStream_t program, int64_t transfer);

    cudaEvent_t begun() const { return begun_; }

private:
    // Those of a number.
    struct Transfers {
        cudaEvent_t end;              // of the last one
        std::list<Places> under_way;  // the results of those that nobody has waited for
    };

    void abandon_transfers(cudaStream_t program);

    // What `later` gets from now on comes after all that `earlier` has now.
    void follow(cudaStream_t later, cudaStream_t earlier);

    bool is_idle() const;

    // `end` may run in another thread. It does nothing once the next program has called `prepare`; one that only joins
    // has no `prepare`, so that `join` locks too.
    std::mutex mutex_;
    int64_t execution_ = 0;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t came_here_ = nullptr, begun_ = nullptr;
    std::map<int64_t, Transfers> numbers_;
    const Transfers* last_apart_ = nullptr;  // with the newest transfer of all, if that is apart
    cudaStream_t behind_all_ = nullptr;      // a stream that is behind all transfers so far, null before the first
};

}  // namespace jaxmagi::collectives
