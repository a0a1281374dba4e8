#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <list>
#include <map>
#include <vector>

// The stream of a group: its transfers run there one after another, beside what the program computes. Those that are
// under way at once are told apart by numbers of the program's choice. A number that is used anew before its first
// transfer has been waited for does no harm but that `join` waits for the later one as well.

namespace jaxmagi::collectives {

// Where the arrays of a transfer lie.
using Places = std::vector<const void*>;

// For one host thread at a time, with the device current that was so in `create`. Failures throw.
class TransferStream {
public:
    // Of the highest priority: where multiprocessors become free, transfers get them before computations.
    void create();

    // After the device has come to rest.
    void destroy();

    // Makes ready for a transfer of this number; takes the driver a while the first time.
    void prepare(int64_t transfer);

    // What is launched from now on comes after all that `program` has now.
    void follow(cudaStream_t program);

    // All that was launched so far is the transfer, with results in these places.
    void record(int64_t transfer, Places results);

    // What `program` gets from now on comes after the transfer. Throws if that has no results in these places: then XLA
    // has copied them before they were complete.
    void join(cudaStream_t program, int64_t transfer, const Places& results);

    // What `program` gets from now on comes after `begun`, which the transfer records when it has its multiprocessors.
    // Else kernels of the program that take all of them would often be faster: it takes this stream some microseconds
    // to hear of the program's event.
    void let_begin(cudaStream_t program);

    cudaEvent_t begun() const { return begun_; }
    cudaStream_t get() const { return stream_; }

private:
    struct Transfers {
        cudaEvent_t end;             // of the last one
        std::list<Places> under_way;  // their results
    };

    cudaStream_t stream_ = nullptr;
    cudaEvent_t program_came_here_ = nullptr, begun_ = nullptr;
    std::map<int64_t, Transfers> transfers_;  // by their numbers
};

}  // namespace jaxmagi::collectives
