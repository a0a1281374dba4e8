#include "csrc/collectives/peers.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>
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

constexpr size_t kHostNameBytes = 64;

struct Introduction {
    ProcessIdentity identity;
    IpcMemory control;
};

size_t gather_offset() {
    return round_up(sizeof(ControlBlock), 256);
}

// Allocates the control block, the buffer of `all_gather`, and room for a host's name and the slots of ranks.
char* allocate_control(int size, cudaStream_t stream) {
    const size_t bytes = gather_offset() + gather_bytes(size) + kHostNameBytes + size * sizeof(int16_t);
    char* const memory = allocate_ipc(bytes);
    if (memory == nullptr)
        throw std::runtime_error("no device memory is left for the collectives' control block of " +
                                 std::to_string(bytes) + " bytes");
    check_cuda(cudaMemsetAsync(memory, 0, sizeof(ControlBlock), stream), "clearing the control block");
    return memory;
}

// Throws on all ranks alike if a host has more ranks than slots.
void check_hosts(const std::vector<Introduction>& introductions) {
    std::map<std::string, int> ranks;
    for (const Introduction& each : introductions)
        if (const int count = ++ranks[std::string(each.identity.host.begin(), each.identity.host.end())];
            count > kMaxNativeRanks and introductions.size() > kMaxNativeRanks)
            throw std::runtime_error("a group of " + std::to_string(introductions.size()) + " ranks has more than " +
                                     std::to_string(kMaxNativeRanks) + " on host " + each.identity.host_name());
}

void number_slots(Peers& peers, const ProcessIdentity& own, const std::vector<Introduction>& introductions) {
    check_hosts(introductions);
    const bool all = peers.size <= kMaxNativeRanks;
    peers.slots.assign(peers.size, -1);
    for (int rank = 0; rank < peers.size; ++rank) {
        peers.host_names.push_back(introductions[rank].identity.host_name());
        if (not all and not own.shares_host(introductions[rank].identity))
            continue;
        peers.slots[rank] = static_cast<int16_t>(peers.num_slots());
        peers.ranks.push_back(rank);
    }
    peers.slot = peers.slots[peers.rank];
}

// Copies the names that kernels know this rank and the others by.
void copy_names(Peers& peers, cudaStream_t stream) {
    char* const host_name = peers.gather_buffer + gather_bytes(peers.size);
    auto* const slots = reinterpret_cast<int16_t*>(host_name + kHostNameBytes);
    std::string name = peers.host_names[peers.rank];
    name.resize(kHostNameBytes - 1);
    check_cuda(cudaMemcpyAsync(host_name, name.c_str(), kHostNameBytes, cudaMemcpyHostToDevice, stream),
               "copying the name of the host to the device");
    check_cuda(cudaMemcpyAsync(slots, peers.slots.data(), peers.size * sizeof *slots, cudaMemcpyHostToDevice, stream),
               "copying the slots of ranks to the device");
    check_cuda(cudaStreamSynchronize(stream), "copying the slots of ranks to the device");
    peers.device_host_name = host_name;
    peers.device_slots = peers.size <= kMaxNativeRanks ? nullptr : slots;
}

// Returns another rank's control block, or null where this device has no access.
char* open_control(const ProcessIdentity& own, const Introduction& other) {
    if (own.shares_process(other.identity))
        return enable_peer_access(own.ordinal, other.identity.ordinal) ? other.control.pointer : nullptr;
    return own.shares_host(other.identity) ? open_ipc(other.control) : nullptr;
}

MappedSlots open_controls(Peers& peers, const ProcessIdentity& own, const std::vector<Introduction>& introductions) {
    MappedSlots mapped{};
    for (int slot = 0; slot < peers.num_slots(); ++slot) {
        const Introduction& other = introductions[peers.ranks[slot]];
        peers.is_same_process[slot] = own.shares_process(other.identity);
        peers.ordinals[slot] = peers.is_same_process[slot] ? other.identity.ordinal : -1;
        char* const memory = slot == peers.slot ? other.control.pointer : open_control(own, other);
        peers.control[slot] = reinterpret_cast<ControlBlock*>(memory);
        mapped.contains[slot] = memory != nullptr;
    }
    return mapped;
}

void close_control(Peers& peers, int slot) {
    ControlBlock* const opened = std::exchange(peers.control[slot], nullptr);
    if (opened != nullptr and not peers.is_same_process[slot])
        close_ipc(reinterpret_cast<char*>(opened));
}

// Ranks reach each other if both have mapped the other's control block. They then share a host, and number its slots
// alike.
void decide_reachable(Peers& peers, const std::vector<Introduction>& introductions,
                      const std::vector<MappedSlots>& mapped) {
    const auto slot_at = [&](int rank, int other) {  // the slot of a rank among those of another one's host
        if (peers.size <= kMaxNativeRanks)
            return rank;
        int slot = 0;
        for (int before = 0; before < rank; ++before)
            slot += introductions[before].identity.shares_host(introductions[other].identity);
        return slot;
    };
    const auto is_pair = [&](int a, int b) {
        return introductions[a].identity.shares_host(introductions[b].identity) and
               mapped[a].contains[slot_at(b, a)] and mapped[b].contains[slot_at(a, b)];
    };
    peers.is_one_process = peers.is_one_host = true;
    for (int a = 0; a < peers.size; ++a)
        for (int b = 0; b < a; ++b)
            if (not is_pair(a, b))
                peers.is_one_host = false;
            else if (not introductions[a].identity.shares_process(introductions[b].identity))
                peers.is_one_process = false;
    for (int slot = 0; slot < peers.num_slots(); ++slot) {
        peers.is_reachable[slot] = is_pair(peers.rank, peers.ranks[slot]);
        if (not peers.is_reachable[slot])
            close_control(peers, slot);
    }
}

// Lets NCCL connect all pairs of remote ranks now, if a process has several ranks of the group. NCCL connects a pair at
// its first message, and allocates memory then, which may wait for kernels of the process's other devices; these may
// wait for this rank.
void connect_remote_pairs(const Peers& peers, const std::vector<Introduction>& introductions,
                          const Bootstrap& bootstrap) {
    std::set<std::pair<uint64_t, int64_t>> processes;
    for (const Introduction& each : introductions)
        processes.insert({each.identity.token, each.identity.pid});
    if (processes.size() == introductions.size() or processes.size() == 1)
        return;
    std::vector<nccl::Message> sends, receives;
    for (int peer = 0; peer < peers.size; ++peer) {
        if (const int slot = peers.slots[peer]; slot >= 0 and peers.is_reachable[slot])
            continue;
        sends.push_back({peers.gather_buffer + peers.size * kMaxRecordBytes, 1, peer});
        receives.push_back({peers.gather_buffer + peer * kMaxRecordBytes, 1, peer});
    }
    if (sends.empty())
        return;
    enqueue_nccl(bootstrap.stream, bootstrap.timeout_ms, {peers.who(), "connected the ranks of a group"},
                 [&] { nccl::exchange(sends, receives, peers.communicator, bootstrap.stream); });
    check_cuda(cudaStreamSynchronize(bootstrap.stream), "connecting the ranks of a group");
}

std::unique_ptr<Peers> connect(int ordinal, const Bootstrap& bootstrap) {
    auto peers = std::make_unique<Peers>();
    peers->communicator = bootstrap.communicator;
    peers->rank = nccl::rank(bootstrap.communicator);
    peers->size = nccl::size(bootstrap.communicator);
    // An allocation that has to wait for kernels could keep the threads that these kernels wait for from launching.
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    char* const control = allocate_control(peers->size, bootstrap.stream);
    peers->gather_buffer = control + gather_offset();
    peers->order.create();
    const Introduction own{.identity = identity_of(ordinal), .control = describe_ipc(control)};
    const auto introductions = all_gather(*peers, bootstrap, own);
    number_slots(*peers, own.identity, introductions);
    copy_names(*peers, bootstrap.stream);
    const MappedSlots mapped = open_controls(*peers, own.identity, introductions);
    decide_reachable(*peers, introductions, all_gather(*peers, bootstrap, mapped));
    connect_remote_pairs(*peers, introductions, bootstrap);
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

// Returns the bytes that the kernels of a rank have counted. Its device must be current and idle.
int64_t native_bytes(const Peers& peers) {
    uint64_t bytes;
    check_cuda(cudaMemcpy(&bytes, &peers.control[peers.slot]->native_bytes, sizeof bytes, cudaMemcpyDeviceToHost),
               "reading what has been moved");
    return static_cast<int64_t>(bytes);
}

// --- disconnecting ---

void disconnect(Peers& peers) {
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    unmap_peers(peers);
    for (int slot = 0; slot < peers.num_slots(); ++slot)
        if (slot != peers.slot)
            close_control(peers, slot);
}

void free_all(Peers& peers) {
    count_native(native_bytes(peers));
    peers.retired.push_back(peers.control[peers.slot]);
    for (void* const memory : peers.retired)
        check_cuda(cudaFree(memory), "freeing the memory of the collectives");
    peers.order.destroy();
}

// Calls visit(peers) with each device current in turn.
template <typename Visit> void for_each_connected(const Entries& entries, Visit visit) {
    for (const auto& [key, peers] : entries) {
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
    for (int slot = 0; slot < peers.num_slots(); ++slot)
        if (peers.is_reachable[slot] and peers.is_same_process[slot] and
            not can_access(peers.ordinals[slot], xla_buffer))
            return false;
    peers.accessible.insert(xla_buffer);
    return true;
}

size_t staging_bytes() {
    const std::lock_guard lock(registry().mutex);
    size_t bytes = 0;
    for (const auto& [key, peers] : registry().entries)
        if (peers->sharing == Sharing::kStagingBuffers)
            bytes += peers->shared_bytes[peers->slot];
    return bytes;
}

Statistics statistics() {
    std::vector<std::pair<int, const Peers*>> connected;
    {
        const std::lock_guard lock(registry().mutex);
        for (const auto& [key, peers] : registry().entries)
            connected.emplace_back(key.first, peers.get());
    }
    Statistics sums = counted_on_host();
    if (connected.empty())
        return sums;  // also without a GPU
    const int current = current_ordinal();
    for (const auto& [ordinal, peers] : connected) {
        check_cuda(cudaSetDevice(ordinal), "choosing a device");
        check_cuda(cudaDeviceSynchronize(), "waiting for the device");
        sums.native_bytes += native_bytes(*peers);
    }
    check_cuda(cudaSetDevice(current), "choosing a device");
    return sums;
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
