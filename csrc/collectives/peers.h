#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/collectives/control_block.h"
#include "csrc/collectives/nccl.h"
#include "csrc/collectives/transfer_order.h"
#include "csrc/collectives/xla_pool.h"

// The ranks of a group, and the memory of each that this rank's kernels load from and store to.

namespace jaxmagi::collectives {

// How kernels access arrays of ranks in other processes: the XLA memory pools that the arrays are in are mapped, or,
// if any rank has no such pool, rows are copied through staging buffers. Undecided until the first call that needs it.
enum class Sharing { kUndecided, kXlaPools, kStagingBuffers };

// A rank's view of its group. Ranks are those of the communicator. In a group larger than kMaxRanks no rank is
// reachable, not even this one.
struct Peers {
    nccl::Communicator communicator;
    int rank, size;
    bool is_reachable[kMaxRanks];      // both ranks' kernels can access each other's memory; true for this rank
    bool is_same_process[kMaxRanks];   // reachable or not
    bool is_one_process;               // all reachable pairs of the group share a process; equal on all ranks
    int ordinals[kMaxRanks];           // devices' ordinals in this process; -1 in another process
    ControlBlock* control[kMaxRanks];  // mapped on this device; null where unreachable
    Sharing sharing;                   // equal on all ranks
    char* shared[kMaxRanks];           // XLA pool or staging buffer of each rank, mapped on this device, or null
    size_t shared_bytes[kMaxRanks];
    std::map<int, MappedPool> pools;  // of ranks in other processes
    TransferOrder order;

    char* gather_buffer;                         // device memory of `all_gather`, after the control block
    std::vector<void*> retired;                  // memory that only `finalize` can free
    std::unordered_set<const void*> accessible;  // cache of `is_accessible`

    // Returns this rank's name for messages.
    std::string who() const { return "rank " + std::to_string(rank) + " of " + std::to_string(size); }
};

// Means by which the processes of a group exchange records on the host. A rank that waits for the others longer than
// the time limit ends its process.
struct Bootstrap {
    nccl::Communicator communicator;
    cudaStream_t stream;
    uint64_t timeout_ms;
};

// Returns the peers of a device in a group, and connects them the first time. The result lives until `finalize`.
// Collective over the group, and blocks the host: only for Initialize, with the device `ordinal` current.
//
// NOTES: XLA keeps its communicators until its backend is cleared. A communicator made after that may have the address
// of an old one, so `finalize` comes before.
Peers& connect_peers(int ordinal, const Bootstrap& bootstrap);

// Returns whether all reachable ranks of this process can access a buffer of this rank. False for memory that is not of
// CUDA's virtual memory management, about which nothing is known. The driver is asked once per accessible address,
// since XLA keeps the memory of its pool.
bool is_accessible(Peers& peers, const void* xla_buffer);

// Returns the device memory of all staging buffers in use in this process, for use between calls.
size_t staging_bytes();

// Frees everything of this process; later calls connect again. To be called in all processes, after their last
// collective call has ended and before the next one starts.
void finalize();

}  // namespace jaxmagi::collectives
