#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/collectives/nccl.h"
#include "csrc/collectives/transfer_order.h"
#include "csrc/collectives/xla_pool.h"

// The memory of other ranks that a rank's kernels load from and store to.

namespace jaxmagi::collectives {

constexpr int kMaxRanks = 64;  // of a group that the native kernels serve

// How ranks use XLA's buffers of other processes: mapped, with the pools that they are in; or copied through arenas, if
// any rank has no such pool. Undecided until the first call that needs it.
enum class Sharing { kUndecided, kPools, kArenas };

// What a rank knows of its group, ranks being those of the communicator. In a larger group than kMaxRanks no rank is
// reachable, not even the own one.
struct Peers {
    int rank, size;
    bool is_reachable[kMaxRanks];     // kernels of both can use each other's memory; of the own rank true
    bool is_same_process[kMaxRanks];  // reachable or not
    bool shares_process;              // in the whole group reachable ranks share a process; the same on all ranks
    int ordinals[kMaxRanks];          // of their devices, as this process numbers them; -1 in another process
    char* control[kMaxRanks];         // control blocks, as this device addresses them; null where unreachable
    Sharing sharing;                  // the same on all ranks
    char* shared[kMaxRanks];          // pool or arena of each, as this device addresses it; null if there is none
    size_t shared_bytes[kMaxRanks];
    std::map<int, MappedPool> pools;  // of ranks in other processes
    TransferOrder order;  // of all calls of the group: they take turns, whoever makes them

    char* scratch;                               // of exchanges between the hosts, behind the own control block
    std::vector<char*> retired;                  // arenas that could not be freed yet
    std::unordered_set<const void*> accessible;  // see `is_accessible`

    // For messages.
    std::string who() const { return "rank " + std::to_string(rank) + " of " + std::to_string(size); }
};

// How ranks come together, and for how long one waits for the others: then it ends the process.
struct Exchange {
    nccl::Communicator communicator;
    cudaStream_t stream;
    uint64_t timeout_ms;
};

// Collective over the group, and blocks the host: only for Initialize, with the rank's CUDA device, `ordinal`, current.
// Asks the group once per device and communicator; what it returns lives until `finalize`. Control blocks have
// `control_bytes` (the same on all ranks), are aligned to 256 and zero at first.
//
// NOTES: XLA keeps its communicators until its backend is cleared. A communicator made after that may have the address
// of an old one, so `finalize` comes before.
Peers& peers_of(int ordinal, const Exchange& exchange, size_t control_bytes);

// Whether all reachable ranks in this process can use a buffer of this rank. False for memory that is not of CUDA's
// virtual memory management, of which nothing is known. The driver is asked once for each address that is: XLA's pool
// keeps its memory.
bool is_accessible(Peers& peers, const void* xla_buffer);

// What all arenas in use have in this process, beside XLA's pools. Between calls.
size_t arena_bytes();

// Frees everything of this process; later calls start anew. To be called on all processes, after their last collective
// call has ended and before the next begins.
void finalize();

}  // namespace jaxmagi::collectives
