#include "xla_ffi/collectives_launch.h"

#include <tuple>
#include <utility>
#include <vector>

#include "csrc/collectives/watchdog.h"

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

void exchange_pair_buffers(const Launch& launch) {
    const auto& [transfer, buffers, group, stream, begun] = launch;
    if (begun != nullptr)
        check_cuda(cudaEventRecord(begun, stream), "recording an event");
    const size_t bytes = static_cast<size_t>(transfer.pair_bytes);
    std::vector<nccl::Message> sends, receives;
    for (int peer = 0; peer < transfer.size; ++peer)
        if (not transfer.is_native(peer)) {
            sends.push_back({transfer.outgoing + peer * transfer.pair_bytes, bytes, peer});
            receives.push_back({transfer.incoming + peer * transfer.pair_bytes, bytes, peer});
        }
    watch(stream, transfer.timeout_ns / 1'000'000, group.peers->who(), "moved the rows of a group collective",
          [&] { nccl::exchange(sends, receives, group.communicator, stream); });
}

enum class Direction { kToPeers, kFromPeers };

// Where peers cannot use the arrays themselves.
void copy_shared(Direction direction, const Launch& launch, const std::vector<ffi::AnyBuffer>& shared) {
    const Transfer& transfer = launch.transfer;
    for (size_t i = 0; i < shared.size(); ++i) {
        const uint64_t place = transfer.places[i];
        void* const in_shared = place & kInShared ? transfer.shared[transfer.rank] + (place & ~kInShared)
                                                  : reinterpret_cast<void*>(place);
        void* const in_xla = shared[i].untyped_data();
        const bool is_to_peers = direction == Direction::kToPeers;
        if (in_shared != in_xla)
            check_cuda(cudaMemcpyAsync(is_to_peers ? in_shared : in_xla, is_to_peers ? in_xla : in_shared,
                                       shared[i].size_bytes(), cudaMemcpyDeviceToDevice, launch.stream),
                       "copying between XLA's arrays and what the peers use");
    }
}

// The arrays from the i-th one on that are added up as it is, unless an earlier one is too.
Transfer of_one_kind(const Transfer& transfer, const Buffers& buffers, int i) {
    const auto kind = [&](int j) { return std::pair(number_of(buffers.from[j]), number_of(buffers.to[j])); };
    Transfer part = transfer;
    part.num_arrays = 0;
    std::tie(part.number, part.sum_number) = kind(i);
    check(part.sum_number == part.number or (part.sum_number == Number::kF32 and part.number != Number::kF64),
          "sums of " + type_name(buffers.from[i].element_type()) + " must be of that type or f32, got " +
              type_name(buffers.to[i].element_type()));
    for (int j = 0; j < i; ++j)
        if (kind(j) == kind(i))
            return part;
    for (int j = i; j < transfer.num_arrays; ++j)
        if (kind(j) == kind(i)) {
            part.places[part.num_arrays] = transfer.places[j];
            part.arrays[part.num_arrays++] = transfer.arrays[j];
        }
    return part;
}

}  // namespace

void launch_cast(const Launch& launch) {
    const auto& [transfer, buffers, group, stream, begun] = launch;
    check_cuda(push_rows(transfer, stream, launch.is_native() ? begun : nullptr),
               "launching the kernel that pushes rows");
    copy_shared(Direction::kFromPeers, launch, buffers.to);
    if (launch.is_native())
        return;
    exchange_pair_buffers(launch);
    check_cuda(fill_rows(transfer, stream), "launching the kernel that fills rows");
}

void launch_reduce(const Launch& launch) {
    const auto& [transfer, buffers, group, stream, begun] = launch;
    copy_shared(Direction::kToPeers, launch, buffers.from);
    if (not launch.is_native()) {
        check_cuda(pack_partials(transfer, stream), "launching the kernel that packs rows");
        exchange_pair_buffers(launch);
    }
    for (int i = 0; i < transfer.num_arrays; ++i)
        if (const Transfer part = of_one_kind(transfer, buffers, i); part.num_arrays > 0)
            check_cuda(pull_sums(part, stream, launch.is_native() and i == 0 ? begun : nullptr),
                       "launching the kernels that add up rows");
}

}  // namespace jaxmagi
