#include "csrc/collectives/peer_memory.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csrc/collectives/descriptor_exchange.h"
#include "csrc/collectives/host_all_gather.h"
#include "csrc/collectives/ipc_memory.h"
#include "csrc/common/check_cuda.h"

namespace jaxmagi::collectives {
namespace {

// --- XLA pools ---

std::mutex limits_mutex;

// Returns the memory limits by ordinal; for use under the mutex.
std::map<int, size_t>& memory_limits() {
    static auto* const limits = new std::map<int, size_t>;  // never destroyed: handlers may outlive main
    return *limits;
}

size_t memory_limit() {
    const std::lock_guard lock(limits_mutex);
    return memory_limits()[current_ordinal()];
}

// The record of its pool that a rank sends to the others.
struct Offer {
    Pool pool;  // of 0 bytes if there is none
    SocketAddress address;

    bool has_pool() const { return pool.bytes > 0; }
    bool is_usable() const { return has_pool() and address.has_socket; }
};

// Returns the pool that any of the buffers is in, if the ranks of this process can access it too.
Pool own_pool(Peers& peers, std::span<const void* const> xla_buffers) {
    for (const void* const buffer : xla_buffers)
        if (const auto pool = find_pool(buffer, memory_limit()))
            return is_accessible(peers, buffer) ? *pool : Pool{};
    return {};
}

// Maps the pools of ranks in other processes, as far as it succeeds.
std::map<int, MappedPool> map_pools(const Peers& peers, const std::vector<Offer>& offers, const FileDescriptor& own,
                                    const DescriptorExchange& exchange, std::chrono::milliseconds timeout) {
    std::map<int, SocketAddress> others;
    for (int slot = 0; slot < peers.num_slots(); ++slot)
        if (peers.is_reachable[slot] and not peers.is_same_process[slot])
            others[slot] = offers[peers.ranks[slot]].address;
    std::map<int, MappedPool> pools;
    for (const auto& [slot, descriptor] : exchange.run(peers.slot, own, others, timeout))
        if (MappedPool pool(descriptor, offers[peers.ranks[slot]].pool.bytes); pool.begin() != nullptr)
            pools.emplace(slot, std::move(pool));
    return pools;
}

void use_pools(Peers& peers, const std::vector<Offer>& offers) {
    for (int slot = 0; slot < peers.num_slots(); ++slot)
        if (peers.is_reachable[slot]) {
            const Pool& pool = offers[peers.ranks[slot]].pool;
            const auto found = peers.pools.find(slot);
            peers.shared[slot] = found == peers.pools.end() ? pool.begin : found->second.begin();
            peers.shared_bytes[slot] = pool.bytes;
        }
}

// Reports why pools cannot be used although a rank has one, as staging buffers take memory and time.
Sharing fall_back_to_staging(const Peers& peers, int64_t rank, const char* reason) {
    if (peers.rank == 0)
        std::fprintf(stderr, "jaxmagi: rank %d %s, so that the %d ranks of its group copy rows through other memory\n",
                     static_cast<int>(rank), reason, peers.size);
    return Sharing::kStagingBuffers;
}

MappedSlots all_slots() {
    MappedSlots slots;
    std::ranges::fill(slots.contains, true);
    return slots;
}

bool is_all_slots(const MappedSlots& slots) {
    return std::ranges::count(slots.contains, false) == 0;
}

// Decides the same on all ranks.
Sharing try_pools(Peers& peers, const Bootstrap& bootstrap, std::span<const void* const> xla_buffers) {
    constexpr uint64_t kMaxExchangeMs = 10'000;  // all ranks have just met, and must wait less than their time limit
    const DescriptorExchange exchange;
    Offer own{.pool = own_pool(peers, xla_buffers), .address = exchange.address()};
    const FileDescriptor descriptor = own.has_pool() ? export_pool(own.pool) : FileDescriptor();
    if (not descriptor)
        own.pool = {};
    const auto offers = all_gather(peers, bootstrap, own);
    if (std::ranges::none_of(offers, &Offer::has_pool))
        return Sharing::kStagingBuffers;
    if (const auto without = std::ranges::find_if_not(offers, &Offer::is_usable); without != offers.end())
        return fall_back_to_staging(peers, without - offers.begin(), "has no memory pool of JAX's that others can use");
    const std::chrono::milliseconds timeout(std::min(kMaxExchangeMs, bootstrap.timeout_ms / 2));
    // Mapped until the end, even if pools are not used: the note in peers.cc says why nothing is freed here.
    peers.pools = map_pools(peers, offers, descriptor, exchange, timeout);
    MappedSlots mapped = all_slots();
    for (int slot = 0; slot < peers.num_slots(); ++slot)
        mapped.contains[slot] =
            not peers.is_reachable[slot] or peers.is_same_process[slot] or peers.pools.contains(slot);
    const auto all_mapped = all_gather(peers, bootstrap, mapped);
    const auto without = std::ranges::find_if_not(all_mapped, is_all_slots);
    if (without != all_mapped.end())
        return fall_back_to_staging(peers, without - all_mapped.begin(),
                                    "could not map the memory pool of another (in another network namespace?)");
    use_pools(peers, offers);
    return Sharing::kXlaPools;
}

// --- staging buffers ---

void close_staging(Peers& peers) {
    for (int slot = 0; slot < peers.num_slots(); ++slot) {
        peers.shared_bytes[slot] = 0;
        if (slot == peers.slot)
            continue;
        char* const opened = std::exchange(peers.shared[slot], nullptr);
        if (opened != nullptr and not peers.is_same_process[slot])
            close_ipc(opened);
    }
}

// Frees this rank's staging buffer, which no other rank maps. Where the process has other ranks of the group, the note
// in peers.cc forbids it, and `finalize` does it later.
void release_staging(Peers& peers) {
    char* const staging = std::exchange(peers.shared[peers.slot], nullptr);
    if (std::count(peers.is_same_process, peers.is_same_process + peers.num_slots(), true) == 1)
        check_cuda(cudaFree(staging), "freeing a staging buffer");
    else if (staging != nullptr)
        peers.retired.push_back(staging);
}

// Throws on all ranks alike.
void check_allocated(const std::vector<IpcMemory>& staging, size_t bytes) {
    const auto failed = std::ranges::find(staging, nullptr, &IpcMemory::pointer);
    if (failed != staging.end())
        throw std::runtime_error("rank " + std::to_string(failed - staging.begin()) + " of the group has no " +
                                 std::to_string(bytes) +
                                 " bytes of device memory left for its staging buffer, beside JAX's own pool (which "
                                 "XLA_PYTHON_CLIENT_MEM_FRACTION sizes)");
}

MappedSlots open_staging(Peers& peers, const std::vector<IpcMemory>& staging) {
    MappedSlots mapped = all_slots();
    for (int slot = 0; slot < peers.num_slots(); ++slot) {
        const IpcMemory& memory = staging[peers.ranks[slot]];
        if (slot != peers.slot and peers.is_reachable[slot])
            peers.shared[slot] = peers.is_same_process[slot] ? memory.pointer : open_ipc(memory);
        mapped.contains[slot] = peers.shared[slot] != nullptr or not peers.is_reachable[slot];
    }
    return mapped;
}

// Throws on all ranks alike.
void check_opened(const Peers& peers, const std::vector<MappedSlots>& mapped) {
    const auto failed = std::ranges::find_if_not(mapped, is_all_slots);
    if (failed != mapped.end())
        throw std::runtime_error(peers.name_of(static_cast<int>(failed - mapped.begin())) +
                                 " could not open the staging buffer of another rank of its host");
}

void grow_staging(Peers& peers, const Bootstrap& bootstrap, size_t bytes) {
    host_barrier(peers, bootstrap);  // now no kernel of any rank uses a staging buffer,
    close_staging(peers);
    host_barrier(peers, bootstrap);  // and no other rank maps this rank's
    release_staging(peers);
    peers.shared[peers.slot] = allocate_ipc(bytes);
    const auto staging = all_gather(peers, bootstrap, describe_ipc(peers.shared[peers.slot]));
    check_allocated(staging, bytes);
    check_opened(peers, all_gather(peers, bootstrap, open_staging(peers, staging)));
    std::fill_n(peers.shared_bytes, peers.num_slots(), bytes);
}

}  // namespace

void set_memory_limit(int ordinal, size_t bytes) {
    const std::lock_guard lock(limits_mutex);
    memory_limits()[ordinal] = bytes;
}

void map_peers(Peers& peers, const Bootstrap& bootstrap, size_t bytes, std::span<const void* const> xla_buffers) {
    if (peers.is_one_process or peers.sharing == Sharing::kXlaPools or
        (peers.sharing == Sharing::kStagingBuffers and bytes <= peers.shared_bytes[peers.slot]))
        return;
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    if (peers.sharing == Sharing::kUndecided)
        peers.sharing = try_pools(peers, bootstrap, xla_buffers);
    if (peers.sharing == Sharing::kStagingBuffers)
        grow_staging(peers, bootstrap, bytes);
}

void unmap_peers(Peers& peers) {
    if (peers.sharing == Sharing::kStagingBuffers) {
        close_staging(peers);
        peers.retired.push_back(std::exchange(peers.shared[peers.slot], nullptr));
    }
    peers.pools.clear();
}

}  // namespace jaxmagi::collectives
