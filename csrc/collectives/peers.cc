#include "csrc/collectives/peers.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/collectives/host_all_gather.h"
#include "csrc/collectives/ipc_memory.h"
#include "csrc/collectives/peer_memory.h"
#include "csrc/collectives/process_identity.h"
#include "csrc/common/check_cuda.h"
#include "csrc/common/math.h"

// NOTES: while a thread is in cudaFree, the driver may wait for kernels of other devices in its process and keep their
// threads from launching. So nothing is freed while such a device may run a kernel that waits for this rank. After an
// error, memory stays allocated, since peers may have mapped it.

namespace jaxmagi::collectives {
namespace {

// --- connecting ---

struct Introduction {
    ProcessIdentity identity;
    IpcMemory control;
};

char* allocate_control(Peers& peers, cudaStream_t stream) {
    const size_t offset = round_up(sizeof(ControlBlock), 256), bytes = offset + kGatherBytes;
    char* const memory = allocate_ipc(bytes);
    if (memory == nullptr)
        throw std::runtime_error("no device memory is left for the collectives' control block of " +
                                 std::to_string(bytes) + " bytes");
    peers.control[peers.rank] = reinterpret_cast<ControlBlock*>(memory);
    peers.gather_buffer = memory + offset;
    check_cuda(cudaMemsetAsync(memory, 0, sizeof(ControlBlock), stream), "clearing the control block");
    return memory;
}

// Returns another rank's control block, or null where this device has no access.
char* open_control(const ProcessIdentity& own, const Introduction& other) {
    if (own.shares_process(other.identity))
        return enable_peer_access(own.ordinal, other.identity.ordinal) ? other.control.pointer : nullptr;
    return own.shares_host(other.identity) ? open_ipc(other.control) : nullptr;
}

MappedRanks open_controls(Peers& peers, const ProcessIdentity& own, const std::vector<Introduction>& introductions) {
    MappedRanks mapped{};
    for (int peer = 0; peer < peers.size; ++peer) {
        const Introduction& other = introductions[peer];
        peers.is_same_process[peer] = own.shares_process(other.identity);
        peers.ordinals[peer] = peers.is_same_process[peer] ? other.identity.ordinal : -1;
        if (peer != peers.rank)
            peers.control[peer] = reinterpret_cast<ControlBlock*>(open_control(own, other));
        mapped.contains[peer] = peers.control[peer] != nullptr;
    }
    return mapped;
}

void close_control(Peers& peers, int peer) {
    ControlBlock* const opened = std::exchange(peers.control[peer], nullptr);
    if (opened != nullptr and not peers.is_same_process[peer])
        close_ipc(reinterpret_cast<char*>(opened));
}

// Ranks reach each other if both have mapped the other's control block.
void decide_reachable(Peers& peers, const std::vector<Introduction>& introductions,
                      const std::vector<MappedRanks>& mapped) {
    const auto is_pair = [&](int a, int b) { return mapped[a].contains[b] and mapped[b].contains[a]; };
    peers.is_one_process = true;
    for (int a = 0; a < peers.size; ++a)
        for (int b = 0; b < a; ++b)
            if (is_pair(a, b) and not introductions[a].identity.shares_process(introductions[b].identity))
                peers.is_one_process = false;
    for (int peer = 0; peer < peers.size; ++peer) {
        peers.is_reachable[peer] = is_pair(peers.rank, peer);
        if (not peers.is_reachable[peer])
            close_control(peers, peer);
    }
}

std::unique_ptr<Peers> connect(int ordinal, const Bootstrap& bootstrap) {
    auto peers = std::make_unique<Peers>();
    peers->communicator = bootstrap.communicator;
    peers->rank = nccl::rank(bootstrap.communicator);
    peers->size = nccl::size(bootstrap.communicator);
    peers->is_one_process = true;
    if (peers->size > kMaxRanks)
        return peers;
    // An allocation that has to wait for kernels could keep the threads that these kernels wait for from launching.
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    char* const control = allocate_control(*peers, bootstrap.stream);
    peers->order.create();
    const Introduction own{.identity = identity_of(ordinal), .control = describe_ipc(control)};
    const auto introductions = all_gather(*peers, bootstrap, own);
    const MappedRanks mapped = open_controls(*peers, own.identity, introductions);
    decide_reachable(*peers, introductions, all_gather(*peers, bootstrap, mapped));
    return peers;
}

// --- registry ---

using Entries = std::map<std::pair<int, nccl::Communicator>, std::unique_ptr<Peers>>;  // by the device's ordinal

struct Registry {
    std::mutex mutex;
    Entries entries;
};

Registry& registry() {
    static auto* const registry = new Registry;  // never destroyed: at exit CUDA may be gone
    return *registry;
}

// --- disconnecting ---

void disconnect(Peers& peers) {
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    unmap_peers(peers);
    for (int peer = 0; peer < peers.size; ++peer)
        if (peer != peers.rank)
            close_control(peers, peer);
}

void free_all(Peers& peers) {
    peers.retired.push_back(peers.control[peers.rank]);
    for (void* const memory : peers.retired)
        check_cuda(cudaFree(memory), "freeing the memory of the collectives");
    peers.order.destroy();
}

// Calls visit(peers) with each device current in turn.
template <typename Visit> void for_each_connected(const Entries& entries, Visit visit) {
    for (const auto& [key, peers] : entries)
        if (peers->size <= kMaxRanks) {
            check_cuda(cudaSetDevice(key.first), "choosing a device");
            visit(*peers);
        }
}

}  // namespace

Peers& connect_peers(int ordinal, const Bootstrap& bootstrap) {
    Registry& known = registry();
    const std::pair key(ordinal, bootstrap.communicator);
    {
        const std::lock_guard lock(known.mutex);
        const auto found = known.entries.find(key);
        if (found != known.entries.end())
            return *found->second;
    }
    // Unlocked, since this waits for other devices of the process, whose threads come here as well. No other thread
    // connects the same key: XLA runs one program at a time on a communicator.
    auto peers = connect(ordinal, bootstrap);
    const std::lock_guard lock(known.mutex);
    return *known.entries.emplace(key, std::move(peers)).first->second;
}

bool is_accessible(Peers& peers, const void* xla_buffer) {
    if (peers.accessible.contains(xla_buffer))
        return true;
    for (int peer = 0; peer < std::min(peers.size, kMaxRanks); ++peer)
        if (peers.is_reachable[peer] and peers.is_same_process[peer] and
            not can_access(peers.ordinals[peer], xla_buffer))
            return false;
    peers.accessible.insert(xla_buffer);
    return true;
}

size_t staging_bytes() {
    const std::lock_guard lock(registry().mutex);
    size_t bytes = 0;
    for (const auto& [key, peers] : registry().entries)
        if (peers->sharing == Sharing::kStagingBuffers)
            bytes += peers->shared_bytes[peers->rank];
    return bytes;
}

void finalize() {
    Entries entries;
    {
        const std::lock_guard lock(registry().mutex);
        entries.swap(registry().entries);
    }
    if (entries.empty())
        return;  // also without a GPU
    const int current = current_ordinal();
    for_each_connected(entries, disconnect);
    for_each_connected(entries, free_all);  // only now does no device of this process access another's memory
    check_cuda(cudaSetDevice(current), "choosing a device");
}

}  // namespace jaxmagi::collectives
