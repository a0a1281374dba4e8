#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

#include "csrc/collectives/peers.h"
#include "csrc/collectives/watchdog.h"
#include "csrc/common/check_cuda.h"

// Exchanges between the hosts, through device memory. Collective over the group.

namespace jaxmagi::collectives {

constexpr size_t kLargestRecord = 256, kScratchBytes = (kMaxRanks + 1) * kLargestRecord;

// Which ranks' memory a rank can use.
struct View {
    bool has_opened[kMaxRanks];
};

// What each rank has. The host waits for the stream before it copies to pageable memory, since a copy that has to wait
// may keep other threads from the device.
template <typename Record>
std::vector<Record> gather(const Peers& peers, const Exchange& exchange, const Record& own) {
    static_assert(std::is_trivially_copyable_v<Record> and sizeof(Record) <= kLargestRecord);
    Record* const all = reinterpret_cast<Record*>(peers.scratch);
    std::vector<Record> records(peers.size);
    check_cuda(cudaMemcpyAsync(all + peers.size, &own, sizeof own, cudaMemcpyHostToDevice, exchange.stream),
               "copying a record to the device");
    watch(exchange.stream, exchange.timeout_ms, peers.who(), "brought the ranks of a group together",
          [&] { nccl::all_gather(all + peers.size, all, sizeof own, exchange.communicator, exchange.stream); });
    check_cuda(cudaStreamSynchronize(exchange.stream), "gathering the ranks' records");
    check_cuda(cudaMemcpyAsync(records.data(), all, peers.size * sizeof own, cudaMemcpyDeviceToHost, exchange.stream),
               "copying the ranks' records to the host");
    check_cuda(cudaStreamSynchronize(exchange.stream), "copying the ranks' records to the host");
    return records;
}

inline void wait_for_all(const Peers& peers, const Exchange& exchange) {
    gather(peers, exchange, char{});
}

}  // namespace jaxmagi::collectives
