#include "csrc/collectives/peers.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/collectives/gather.h"
#include "csrc/collectives/identity.h"
#include "csrc/collectives/shared_buffers.h"
#include "csrc/collectives/shared_memory.h"
#include "csrc/common/check_cuda.h"
#include "csrc/common/math.h"

// NOTES: while a thread is in cudaFree, the driver may wait for kernels of other devices in its process and keep their
// threads from launching. So nothing is freed while such a device may run a kernel that waits for this rank. What an
// error leaves behind stays allocated, since peers may have it open.

namespace jaxmagi::collectives {
namespace {

// --- connecting ---

struct Introduction {
    Identity identity;
    SharedMemory control;
};

void allocate_control(Peers& peers, cudaStream_t stream, size_t control_bytes) {
    const size_t offset = round_up(control_bytes, 256);
    char* const block = allocate_shared(offset + kScratchBytes);
    if (block == nullptr)
        throw std::runtime_error("no device memory is left for the collectives' control block of " +
                                 std::to_string(offset + kScratchBytes) + " bytes");
    peers.control[peers.rank] = block;
    peers.scratch = block + offset;
    check_cuda(cudaMemsetAsync(block, 0, control_bytes, stream), "clearing the control block");
}

// Of another rank; null where this device has no access.
char* open_control(const Identity& own, const Introduction& other) {
    if (own.shares_process(other.identity))
        return enable_access(own.ordinal, other.identity.ordinal) ? other.control.pointer : nullptr;
    return own.shares_host(other.identity) ? open_shared(other.control) : nullptr;
}

View open_controls(Peers& peers, const Identity& own, const std::vector<Introduction>& introductions) {
    View view{};
    for (int peer = 0; peer < peers.size; ++peer) {
        const Introduction& other = introductions[peer];
        peers.is_same_process[peer] = own.shares_process(other.identity);
        peers.ordinals[peer] = peers.is_same_process[peer] ? other.identity.ordinal : -1;
        if (peer != peers.rank)
            peers.control[peer] = open_control(own, other);
        view.has_opened[peer] = peers.control[peer] != nullptr;
    }
    return view;
}

void close_control(Peers& peers, int peer) {
    char* const opened = std::exchange(peers.control[peer], nullptr);
    if (opened != nullptr and not peers.is_same_process[peer])
        close_shared(opened);
}

void agree(Peers& peers, const std::vector<Introduction>& introductions, const std::vector<View>& views) {
    const auto reach = [&](int a, int b) { return views[a].has_opened[b] and views[b].has_opened[a]; };
    for (int a = 0; a < peers.size; ++a)
        for (int b = 0; b < a; ++b)
            if (reach(a, b) and not introductions[a].identity.shares_process(introductions[b].identity))
                peers.shares_process = false;
    for (int peer = 0; peer < peers.size; ++peer) {
        peers.is_reachable[peer] = reach(peers.rank, peer);
        if (not peers.is_reachable[peer])
            close_control(peers, peer);
    }
}

std::unique_ptr<Peers> connect(int ordinal, const Exchange& exchange, size_t control_bytes) {
    auto peers = std::make_unique<Peers>();
    peers->rank = nccl::rank(exchange.communicator);
    peers->size = nccl::size(exchange.communicator);
    peers->shares_process = true;
    if (peers->size > kMaxRanks)
        return peers;
    // An allocation that has to wait for kernels could keep the threads of those that they wait for from launching.
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    allocate_control(*peers, exchange.stream, control_bytes);
    peers->order.create();
    const Introduction own{.identity = identity_of(ordinal), .control = describe(peers->control[peers->rank])};
    const auto introductions = gather(*peers, exchange, own);
    const View view = open_controls(*peers, own.identity, introductions);
    agree(*peers, introductions, gather(*peers, exchange, view));
    return peers;
}

// --- the registry ---

struct Registry {
    using Entries = std::map<std::pair<int, nccl::Communicator>, std::unique_ptr<Peers>>;

    std::mutex mutex;
    Entries entries;
};

Registry& registry() {
    static auto* const registry = new Registry;  // never destroyed: at exit CUDA may be gone
    return *registry;
}

// --- the end ---

void disconnect(Peers& peers) {
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    stop_sharing(peers);
    for (int peer = 0; peer < peers.size; ++peer)
        if (peer != peers.rank)
            close_control(peers, peer);
}

void free_all(Peers& peers) {
    peers.retired.push_back(peers.control[peers.rank]);
    for (char* const memory : peers.retired)
        check_cuda(cudaFree(memory), "freeing the memory of the collectives");
    peers.order.destroy();
}

// With the device of each as the current one.
template <typename Visit> void for_each_connected(const Registry::Entries& entries, Visit visit) {
    for (const auto& [key, peers] : entries)
        if (peers->size <= kMaxRanks) {
            check_cuda(cudaSetDevice(key.first), "choosing a device");
            visit(*peers);
        }
}

}  // namespace

Peers& peers_of(int ordinal, const Exchange& exchange, size_t control_bytes) {
    Registry& known = registry();
    const std::pair key(ordinal, exchange.communicator);
    {
        const std::lock_guard lock(known.mutex);
        const auto found = known.entries.find(key);
        if (found != known.entries.end())
            return *found->second;
    }
    // Unlocked, since this waits for other devices of the process that come here as well. Nobody else connects the same
    // key: XLA runs one program at a time on a communicator.
    auto peers = connect(ordinal, exchange, control_bytes);
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

size_t arena_bytes() {
    const std::lock_guard lock(registry().mutex);
    size_t bytes = 0;
    for (const auto& [key, peers] : registry().entries)
        if (peers->sharing == Sharing::kArenas)
            bytes += peers->shared_bytes[peers->rank];
    return bytes;
}

void finalize() {
    Registry::Entries entries;
    {
        const std::lock_guard lock(registry().mutex);
        entries.swap(registry().entries);
    }
    if (entries.empty())
        return;  // also without a GPU
    const int current = current_ordinal();
    for_each_connected(entries, disconnect);
    for_each_connected(entries, free_all);  // only now that no device of this process uses another's memory
    check_cuda(cudaSetDevice(current), "choosing a device");
}

}  // namespace jaxmagi::collectives
