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
#include "csrc/collectives/statistics.h"
#include "csrc/collectives/transfer_order.h"
#include "csrc/collectives/xla_pool.h"

// The ranks of a group, and the memory of each that this rank's kernels load from and store to.

namespace jaxmagi::collectives {

// How kernels access arrays of ranks in other processes: the XLA memory pools that the arrays are in are mapped, or,
// if any rank has no such pool, rows are copied through staging buffers. Undecided until the first call that needs it.
enum class Sharing { kUndecided, kXlaPools, kStagingBuffers };

// A rank's view of its group. Ranks are those of the communicator. The kernels know ranks by slots: in a group of at
// most kMaxNativeRanks all ranks have slots, which are their ranks; in a larger one only those of this rank's host
// have, and slots count them in order. So ranks that may reach each other agree on slots.
struct Peers {
    nccl::Communicator communicator;
    int rank, size, slot;
    std::vector<int> ranks;               // by slot
    std::vector<int16_t> slots;           // by rank; -1 for a rank without a slot
    const int16_t* device_slots;          // the same on the device; null where slots are ranks
    std::vector<std::string> host_names;  // by rank
    const char* device_host_name;         // this rank's, on the device

    // The following are by slot.
    bool is_reachable[kMaxNativeRanks];      // both ranks' kernels can access each other's memory; true for this rank
    bool is_same_process[kMaxNativeRanks];   // reachable or not
    int ordinals[kMaxNativeRanks];           // devices' ordinals in this process; -1 in another process
    ControlBlock* control[kMaxNativeRanks];  // mapped on this device; null where unreachable
    char* shared[kMaxNativeRanks];           // XLA pool or staging buffer, mapped on this device, or null
    size_t shared_bytes[kMaxNativeRanks];
    std::map<int, MappedPool> pools;  // of ranks in other processes

    bool is_one_process;  // all reachable pairs of the group share a process; equal on all ranks
    bool is_one_host;     // all pairs are reachable; equal on all ranks
    Sharing sharing;      // equal on all ranks
    TransferOrder order;
    int64_t calls;        // transfers so far, equal on all ranks

    char* gather_buffer;                         // device memory of `all_gather`, after the control block
    std::vector<void*> retired;                  // memory that only `finalize` can free
    std::unordered_set<const void*> accessible;  // cache of `is_accessible`

    int num_slots() const { return static_cast<int>(ranks.size()); }

    // Return the name of this rank or another for messages.
    std::string who() const {
        const std::string name = "rank " + std::to_string(rank) + " of " + std::to_string(size);
        return host_names.empty() ? name : name + " on " + host_names[rank];
    }
    std::string name_of(int peer) const {
        const std::string name = "rank " + std::to_string(peer);
        return host_names.empty() ? name : name + " (" + host_names[peer] + ")";
    }
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

// Returns what the transfers of this process have moved, for use between calls: waits for its devices.
Statistics statistics();

// Frees everything of this process; later calls connect again. To be called in all processes, after their last
// collective call has ended and before the next one starts.
void finalize();

}  // namespace jaxmagi::collectives
