#include "csrc/collectives/shared_buffers.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csrc/collectives/descriptor_mail.h"
#include "csrc/collectives/gather.h"
#include "csrc/collectives/shared_memory.h"
#include "csrc/collectives/xla_pool.h"
#include "csrc/common/check_cuda.h"

namespace jaxmagi::collectives {
namespace {

// --- pools ---

struct MemoryLimits {
    std::mutex mutex;
    std::map<int, size_t> bytes;  // by the device's ordinal
};

MemoryLimits& memory_limits() {
    static auto* const limits = new MemoryLimits;  // never destroyed: handlers may outlive main
    return *limits;
}

size_t memory_limit() {
    MemoryLimits& limits = memory_limits();
    const std::lock_guard lock(limits.mutex);
    const auto found = limits.bytes.find(current_ordinal());
    return found == limits.bytes.end() ? 0 : found->second;
}

// What a rank tells the others of its pool.
struct Offer {
    Pool pool;  // of no bytes if there is none
    MailAddress address;

    bool has_pool() const { return pool.bytes > 0; }
    bool is_whole() const { return has_pool() and address.has_socket; }
};

// The pool that any of the buffers is in, if the ranks of this process can use it too.
Pool own_pool(Peers& peers, std::span<const void* const> xla_buffers) {
    for (const void* const buffer : xla_buffers)
        if (const auto pool = find_pool(buffer, memory_limit()))
            return is_accessible(peers, buffer) ? *pool : Pool{};
    return {};
}

// Of the ranks in other processes, as far as it succeeds.
std::map<int, MappedPool> map_pools(const Peers& peers, const std::vector<Offer>& offers, const FileDescriptor& own,
                                    const DescriptorMail& mail, std::chrono::milliseconds timeout) {
    std::map<int, MailAddress> others;
    for (int peer = 0; peer < peers.size; ++peer)
        if (peers.is_reachable[peer] and not peers.is_same_process[peer])
            others[peer] = offers[peer].address;
    std::map<int, MappedPool> pools;
    for (const auto& [peer, descriptor] : mail.swap(peers.rank, own, others, timeout))
        if (MappedPool pool(descriptor, offers[peer].pool.bytes); pool.begin() != nullptr)
            pools.emplace(peer, std::move(pool));
    return pools;
}

bool has_opened_all(const Peers& peers, const View& view) {
    return std::count(view.has_opened, view.has_opened + peers.size, true) == peers.size;
}

void use_pools(Peers& peers, const std::vector<Offer>& offers) {
    for (int peer = 0; peer < peers.size; ++peer)
        if (peers.is_reachable[peer]) {
            const auto found = peers.pools.find(peer);
            peers.shared[peer] = found == peers.pools.end() ? offers[peer].pool.begin : found->second.begin();
            peers.shared_bytes[peer] = offers[peer].pool.bytes;
        }
}

// Where some rank expects pools: arenas take memory and time.
Sharing use_arenas_instead(const Peers& peers, int64_t rank, const char* reason) {
    if (peers.rank == 0)
        std::fprintf(stderr, "jaxmagi: rank %d %s, so that the %d ranks of its group copy rows through other memory\n",
                     static_cast<int>(rank), reason, peers.size);
    return Sharing::kArenas;
}

// Decides the same on all ranks.
Sharing try_pools(Peers& peers, const Exchange& exchange, std::span<const void* const> xla_buffers) {
    constexpr uint64_t kLongestMailMs = 10'000;  // all have just come together, and wait for it within their time limit
    const DescriptorMail mail;
    Offer own{.pool = own_pool(peers, xla_buffers), .address = mail.address()};
    const FileDescriptor descriptor = own.pool.bytes > 0 ? export_pool(own.pool) : FileDescriptor();
    if (not descriptor)
        own.pool = {};
    const auto offers = gather(peers, exchange, own);
    if (std::ranges::none_of(offers, &Offer::has_pool))
        return Sharing::kArenas;
    if (const auto without = std::ranges::find_if_not(offers, &Offer::is_whole); without != offers.end())
        return use_arenas_instead(peers, without - offers.begin(), "has no memory pool of JAX's that others can use");
    const std::chrono::milliseconds timeout(std::min(kLongestMailMs, exchange.timeout_ms / 2));
    // Stays mapped until the end, whatever comes of it: see the note in peers.cc.
    peers.pools = map_pools(peers, offers, descriptor, mail, timeout);
    View view{};
    for (int peer = 0; peer < peers.size; ++peer)
        view.has_opened[peer] =
            not peers.is_reachable[peer] or peers.is_same_process[peer] or peers.pools.contains(peer);
    const auto views = gather(peers, exchange, view);
    const auto without =
        std::ranges::find_if_not(views, [&](const View& each) { return has_opened_all(peers, each); });
    if (without != views.end())
        return use_arenas_instead(peers, without - views.begin(),
                                  "could not map the memory pool of another (in another network namespace?)");
    use_pools(peers, offers);
    return Sharing::kPools;
}

// --- arenas ---

void close_arenas(Peers& peers) {
    for (int peer = 0; peer < peers.size; ++peer) {
        peers.shared_bytes[peer] = 0;
        if (peer == peers.rank)
            continue;
        char* const opened = std::exchange(peers.shared[peer], nullptr);
        if (opened != nullptr and not peers.is_same_process[peer])
            close_shared(opened);
    }
}

// Frees the own arena, which no other rank has open, or puts it aside where others of the group are in this process.
void release_arena(Peers& peers) {
    char* const arena = std::exchange(peers.shared[peers.rank], nullptr);
    if (std::count(peers.is_same_process, peers.is_same_process + peers.size, true) == 1)
        check_cuda(cudaFree(arena), "freeing an arena");
    else if (arena != nullptr)
        peers.retired.push_back(arena);
}

// Throws on all ranks alike.
void check_allocated(const std::vector<SharedMemory>& arenas, size_t bytes) {
    const auto failed = std::ranges::find(arenas, nullptr, &SharedMemory::pointer);
    if (failed != arenas.end())
        throw std::runtime_error("rank " + std::to_string(failed - arenas.begin()) + " of the group has no " +
                                 std::to_string(bytes) +
                                 " bytes of device memory left for its arena, beside JAX's own pool (which "
                                 "XLA_PYTHON_CLIENT_MEM_FRACTION sizes)");
}

void open_arenas(Peers& peers, const std::vector<SharedMemory>& arenas) {
    for (int peer = 0; peer < peers.size; ++peer)
        if (peer != peers.rank and peers.is_reachable[peer])
            peers.shared[peer] = peers.is_same_process[peer] ? arenas[peer].pointer : open_shared(arenas[peer]);
}

// Throws on all ranks alike.
void check_opened(const Peers& peers, const std::vector<View>& views) {
    for (int rank = 0; rank < peers.size; ++rank)
        for (int peer = 0; peer < peers.size; ++peer)
            if (not views[rank].has_opened[peer])
                throw std::runtime_error("rank " + std::to_string(rank) + " of the group could not open the arena of " +
                                         "rank " + std::to_string(peer));
}

void grow_arenas(Peers& peers, const Exchange& exchange, size_t bytes) {
    wait_for_all(peers, exchange);  // now no kernel of any rank uses an arena,
    close_arenas(peers);
    wait_for_all(peers, exchange);  // and nobody else has this rank's open
    release_arena(peers);
    peers.shared[peers.rank] = allocate_shared(bytes);
    const auto arenas = gather(peers, exchange, describe(peers.shared[peers.rank]));
    check_allocated(arenas, bytes);
    open_arenas(peers, arenas);
    View view{};
    for (int peer = 0; peer < peers.size; ++peer)
        view.has_opened[peer] = peers.shared[peer] != nullptr or not peers.is_reachable[peer];
    check_opened(peers, gather(peers, exchange, view));
    std::fill_n(peers.shared_bytes, peers.size, bytes);
}

}  // namespace

void set_memory_limit(int ordinal, size_t bytes) {
    MemoryLimits& limits = memory_limits();
    const std::lock_guard lock(limits.mutex);
    limits.bytes[ordinal] = bytes;
}

void share_buffers(Peers& peers, const Exchange& exchange, size_t bytes, std::span<const void* const> xla_buffers) {
    if (peers.shares_process or peers.sharing == Sharing::kPools or
        (peers.sharing == Sharing::kArenas and bytes <= peers.shared_bytes[peers.rank]))
        return;
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    if (peers.sharing == Sharing::kUndecided)
        peers.sharing = try_pools(peers, exchange, xla_buffers);
    if (peers.sharing == Sharing::kArenas)
        grow_arenas(peers, exchange, bytes);
}

void stop_sharing(Peers& peers) {
    if (peers.sharing == Sharing::kArenas) {
        close_arenas(peers);
        peers.retired.push_back(std::exchange(peers.shared[peers.rank], nullptr));
    }
    peers.pools.clear();
}

}  // namespace jaxmagi::collectives
