#include "xla_ffi/collectives_launch.h"

#include <bit>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/collectives/remote_rows.h"
#include "csrc/collectives/statistics.h"

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

struct Launch {
    const TransferParams& params;
    const Buffers& buffers;
    Peers& peers;
    const RemoteRows* remote;  // null if this rank has no rows for remote peers, nor they for it
    cudaStream_t stream;
    cudaEvent_t started;  // unless it is null, recorded when the kernels that move rows have their SMs

    void exchange_remote_rows(cudaStream_t in_stream) const {
        remote->pack(in_stream);
        remote->exchange(peers, in_stream, started);
        remote->unpack(in_stream);
    }
};

// The stream of what runs beside the rest of a transfer. The rest waits for it in `join`, or after a failure.
class SideStream {
public:
    SideStream(TransferOrder& order, cudaStream_t stream) : order_(order), stream_(stream), side_(order.fork(stream)) {}
    SideStream(const SideStream&) = delete;
    ~SideStream() {
        if (is_joined_)
            return;
        try {
            join();
        } catch (const std::exception&) {  // the error that has come before tells more
        }
    }

    cudaStream_t stream() const { return side_; }

    void join() {
        is_joined_ = true;
        order_.join(stream_);
    }

private:
    TransferOrder& order_;
    const cudaStream_t stream_, side_;
    bool is_joined_ = false;
};

// Returns the memory in which peers access array `i`.
void* published_memory(const TransferParams& params, size_t i) {
    return reinterpret_cast<void*>(params.resolve(params.published[i], params.slot));
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
          "sums of ", buffers.from[i].element_type(), " must be of that type or f32, got ",
          buffers.to[i].element_type());
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

// Pushes rows to native peers while those of remote peers move: they arrive at different rows.
void push_beside_remote_rows(const Launch& launch) {
    const auto& [params, buffers, peers, remote, stream, started] = launch;
    SideStream side(peers.order, stream);
    const cudaEvent_t pushing = started == nullptr ? nullptr : peers.order.pushing();
    check_cuda(push_rows(params, stream, pushing), "launching the kernel that pushes rows");
    if (pushing != nullptr)  // `started` then tells of both
        check_cuda(cudaStreamWaitEvent(side.stream(), pushing), "waiting for an event");
    launch.exchange_remote_rows(side.stream());
    side.join();
}

void launch_cast(const Launch& launch) {
    const auto& [params, buffers, peers, remote, stream, started] = launch;
    if (remote != nullptr)
        push_beside_remote_rows(launch);
    else
        check_cuda(push_rows(params, stream, started), "launching the kernel that pushes rows");
    for (size_t i = 0; i < buffers.to.size(); ++i)
        copy_if_staged(buffers.to[i].untyped_data(), published_memory(params, i), buffers.to[i], stream);
}

void launch_reduce(const Launch& launch) {
    const auto& [params, buffers, peers, remote, stream, started] = launch;
    for (size_t i = 0; i < buffers.from.size(); ++i)
        copy_if_staged(published_memory(params, i), buffers.from[i].untyped_data(), buffers.from[i], stream);
    if (remote != nullptr)
        launch.exchange_remote_rows(stream);
    for (int i = 0; i < params.num_arrays; ++i)
        if (const TransferParams part = select_dtype(params, buffers, i); part.num_arrays > 0)
            check_cuda(pull_sums(part, stream, remote == nullptr and i == 0 ? started : nullptr),
                       "launching the kernels that sum rows");
}

// Returns the rows that go over NCCL, if there are any.
std::optional<RemoteRows> remote_rows(TransferParams& params, Peers& peers, cudaStream_t program, Scratch& scratch) {
    if (std::popcount(params.native) == peers.size)
        return std::nullopt;
    const auto is_remote = [&](int peer) { return not params.is_native(peers.slots[peer]); };
    const std::string call = std::string(name_of(params.kind)) + ", call " + std::to_string(peers.calls) + " of " +
                             peers.name_of(peers.rank);
    const auto name_of_peer = [&peers](int peer) { return peers.name_of(peer); };
    const auto allocate = [&](size_t bytes) { return scratch.allocate(bytes); };
    RemoteRows rows(params, {call, is_remote, name_of_peer, allocate}, program);
    if (rows.is_empty())
        return std::nullopt;
    rows.add_to(params);
    return rows;
}

}  // namespace

std::vector<MemoryBlock> launch_transfer(Kind kind, const Buffers& buffers, const TransferAttributes& attributes,
                                         Peers& peers, cudaStream_t program, const DeviceMemory& memory) {
    TransferOrder& order = peers.order;
    const bool is_async = attributes.is_async, goes_first = is_async and attributes.goes_first;
    Scratch scratch(memory);
    ++peers.calls;
    TransferParams params = to_params(kind, buffers, attributes, peers, scratch);
    const std::optional<RemoteRows> remote = remote_rows(params, peers, program, scratch);
    const cudaStream_t stream = order.begin(program, is_async);
    const Launch launch{.params = params,
                        .buffers = buffers,
                        .peers = peers,
                        .remote = remote ? &*remote : nullptr,
                        .stream = stream,
                        .started = goes_first ? order.started() : nullptr};
    try {
        (kind == Kind::kCast ? launch_cast : launch_reduce)(launch);
        if (is_async)
            order.end_async(attributes.transfer_id, addresses_of(buffers.to));
        else
            order.end_sync(stream, program);
        if (goes_first)
            order.wait_until_started(program);
    } catch (...) {
        try {
            order.end_sync(stream, program);  // of what has been launched before the failure
        } catch (const std::exception&) {  // the first error tells more
        }
        throw;
    }
    count_transfer();
    return scratch.take();
}

}  // namespace jaxmagi
