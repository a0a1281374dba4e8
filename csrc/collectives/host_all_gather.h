#pragma once

#include <type_traits>
#include <vector>

#include "csrc/collectives/nccl_watchdog.h"
#include "csrc/collectives/peers.h"
#include "csrc/common/check_cuda.h"

// All-gathers of small records between the hosts of a group, by NCCL through device memory.

namespace jaxmagi::collectives {

constexpr size_t kMaxRecordBytes = 256;

// Returns the bytes of `gather_buffer` in a group of `size` ranks.
constexpr size_t gather_bytes(int size) {
    return (size + size_t{1}) * kMaxRecordBytes;
}

// Returns the records of all ranks. Collective over the group, and blocks. The host waits for the stream before it
// copies to pageable memory, since a copy that has to wait may keep other threads from the device.
template <typename Record>
std::vector<Record> all_gather(const Peers& peers, const Bootstrap& bootstrap, const Record& own) {
    static_assert(std::is_trivially_copyable_v<Record> and sizeof(Record) <= kMaxRecordBytes);
    const auto& [communicator, stream, timeout_ms] = bootstrap;
    Record* const all = reinterpret_cast<Record*>(peers.gather_buffer);
    std::vector<Record> records(peers.size);
    check_cuda(cudaMemcpyAsync(all + peers.size, &own, sizeof own, cudaMemcpyHostToDevice, stream),
               "copying a record to the device");
    enqueue_nccl(stream, timeout_ms, {peers.who(), "brought the ranks of a group together"},
                 [&] { nccl::all_gather(all + peers.size, all, sizeof own, communicator, stream); });
    check_cuda(cudaStreamSynchronize(stream), "gathering the ranks' records");
    check_cuda(cudaMemcpyAsync(records.data(), all, peers.size * sizeof own, cudaMemcpyDeviceToHost, stream),
               "copying the ranks' records to the host");
    check_cuda(cudaStreamSynchronize(stream), "copying the ranks' records to the host");
    return records;
}

inline void host_barrier(const Peers& peers, const Bootstrap& bootstrap) {
    all_gather(peers, bootstrap, char{});
}

// The slots of ranks whose memory one rank has mapped.
struct MappedSlots {
    bool contains[kMaxNativeRanks];
};

}  // namespace jaxmagi::collectives
