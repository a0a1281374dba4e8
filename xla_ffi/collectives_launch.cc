#include "xla_ffi/collectives_launch.h"

#include <tuple>
#include <utility>
#include <vector>

#include "csrc/collectives/nccl_watchdog.h"

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

struct Launch {
    const TransferParams& params;
    const Buffers& buffers;
    const Peers& peers;
    cudaStream_t stream;
    // Unless it is null, recorded when the native kernel has its SMs, or where NCCL is used just before its kernel:
    // that is next in the same stream, and so starts before another stream sees the event.
    cudaEvent_t started;

    bool is_native() const { return params.outgoing == nullptr; }
};

void exchange_pair_buffers(const Launch& launch) {
    const auto& [params, buffers, peers, stream, started] = launch;
    if (started != nullptr)
        check_cuda(cudaEventRecord(started, stream), "recording an event");
    const size_t bytes = static_cast<size_t>(params.pair_bytes);
    std::vector<nccl::Message> sends, receives;
    for (int peer = 0; peer < params.size; ++peer)
        if (not params.is_native(peer)) {
            sends.push_back({params.outgoing + peer * params.pair_bytes, bytes, peer});
            receives.push_back({params.incoming + peer * params.pair_bytes, bytes, peer});
        }
    enqueue_nccl(stream, params.timeout_ns / 1'000'000, peers.who(), "moved the rows of a group collective",
                 [&] { nccl::exchange(sends, receives, peers.communicator, stream); });
}

// Returns the memory in which peers access array `i`.
void* published_memory(const TransferParams& params, size_t i) {
    return reinterpret_cast<void*>(params.resolve(params.published[i], params.rank));
}

// Copies where peers cannot access XLA's array itself.
void copy_if_staged(void* to, const void* from, const ffi::AnyBuffer& buffer, cudaStream_t stream) {
    if (to != from)
        check_cuda(cudaMemcpyAsync(to, from, buffer.size_bytes(), cudaMemcpyDeviceToDevice, stream),
                   "copying between XLA's arrays and what the peers use");
}

// Returns the parameters for all arrays with the types of array `i`, or for none if an earlier array has these types.
TransferParams select_dtype(const TransferParams& params, const Buffers& buffers, int i) {
    const auto dtypes = [&](int j) { return std::pair(dtype_of(buffers.from[j]), dtype_of(buffers.to[j])); };
    TransferParams part = params;
    part.num_arrays = 0;
    std::tie(part.dtype, part.sum_dtype) = dtypes(i);
    check(part.sum_dtype == part.dtype or (part.sum_dtype == DType::kF32 and part.dtype != DType::kF64),
          "sums of " + type_name(buffers.from[i].element_type()) + " must be of that type or f32, got " +
              type_name(buffers.to[i].element_type()));
    for (int j = 0; j < i; ++j)
        if (dtypes(j) == dtypes(i))
            return part;
    for (int j = i; j < params.num_arrays; ++j)
        if (dtypes(j) == dtypes(i)) {
            part.published[part.num_arrays] = params.published[j];
            part.arrays[part.num_arrays++] = params.arrays[j];
        }
    return part;
}

void launch_cast(const Launch& launch) {
    const auto& [params, buffers, peers, stream, started] = launch;
    check_cuda(push_rows(params, stream, launch.is_native() ? started : nullptr),
               "launching the kernel that pushes rows");
    for (size_t i = 0; i < buffers.to.size(); ++i)
        copy_if_staged(buffers.to[i].untyped_data(), published_memory(params, i), buffers.to[i], stream);
    if (launch.is_native())
        return;
    exchange_pair_buffers(launch);
    check_cuda(unpack_rows(params, stream), "launching the kernel that unpacks rows");
}

void launch_reduce(const Launch& launch) {
    const auto& [params, buffers, peers, stream, started] = launch;
    for (size_t i = 0; i < buffers.from.size(); ++i)
        copy_if_staged(published_memory(params, i), buffers.from[i].untyped_data(), buffers.from[i], stream);
    if (not launch.is_native()) {
        check_cuda(pack_rows(params, stream), "launching the kernel that packs rows");
        exchange_pair_buffers(launch);
    }
    for (int i = 0; i < params.num_arrays; ++i)
        if (const TransferParams part = select_dtype(params, buffers, i); part.num_arrays > 0)
            check_cuda(pull_sums(part, stream, launch.is_native() and i == 0 ? started : nullptr),
                       "launching the kernels that sum rows");
}

}  // namespace

void launch_transfer(Kind kind, const Buffers& buffers, const TransferAttributes& attributes, Peers& peers,
                     cudaStream_t program, ffi::ScratchAllocator& allocator) {
    TransferOrder& order = peers.order;
    const bool is_async = attributes.is_async, goes_first = is_async and attributes.goes_first;
    Scratch scratch(allocator);
    const TransferParams params = to_params(kind, buffers, attributes, peers, scratch);
    const cudaStream_t stream = order.begin(program, is_async);
    const Launch launch{params, buffers, peers, stream, goes_first ? order.started() : nullptr};
    try {
        (kind == Kind::kCast ? launch_cast : launch_reduce)(launch);
        if (is_async)
            order.end_async(attributes.transfer_id, addresses_of(buffers.to));
        else
            order.end_sync(stream, program);
        if (goes_first)
            order.wait_until_started(program);
        if (is_async and scratch.is_used())
            order.wait_until_complete(program, attributes.transfer_id);
    } catch (...) {
        try {
            order.end_sync(stream, program);  // of what has been launched before the failure
        } catch (const std::exception&) {  // the first error tells more
        }
        throw;
    }
}

}  // namespace jaxmagi
