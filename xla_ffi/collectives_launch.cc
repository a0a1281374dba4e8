#include "xla_ffi/collectives_launch.h"

#include <bit>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/collectives/remote_rows.h"
#include "csrc/collectives/statistics.h"
#include "xla_ffi/side_stream.h"

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

    void exchange_remote_rows(cudaStream_t in_stream) const {
        remote->pack(in_stream);
        remote->exchange(peers, in_stream);
        remote->unpack(in_stream);
    }
};

// Returns the memory in which peers access array `i`.
char* published_memory(const TransferParams& params, size_t i) {
    return reinterpret_cast<char*>(params.resolve(params.published[i], params.slot));
}

// Copies array `i`, [batch, output_rows, width], where peers cannot access XLA's array itself: all rows but those
// before the first one that is written.
void copy_if_staged(const TransferParams& params, size_t i, char* to, const char* from, cudaStream_t stream) {
    if (to == from)
        return;
    const size_t row_bytes = params.arrays[i].row_bytes, bytes = row_bytes * params.output_rows;
    const size_t kept = row_bytes * params.first_output_row;
    for (int index = 0; index < params.batch; ++index)
        check_cuda(cudaMemcpyAsync(to + index * bytes + kept, from + index * bytes + kept, bytes - kept,
                                   cudaMemcpyDeviceToDevice, stream),
                   "copying between XLA's arrays and what the peers use");
}

// Returns the parameters for all arrays with the types of array `i`, or for none if an earlier array has these types.
TransferParams select_dtype(const TransferParams& params, const Buffers& buffers, int i) {
    const auto dtypes = [&](int j) { return std::pair(summed_dtype(buffers.from[j]), summed_dtype(buffers.to[j])); };
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
    const auto& [params, buffers, peers, remote, stream] = launch;
    SideStream side(peers.order, stream);
    check_cuda(push_rows(params, stream), "launching the kernel that pushes rows");
    launch.exchange_remote_rows(side.stream());
    side.join();
}

void launch_cast(const Launch& launch) {
    const auto& [params, buffers, peers, remote, stream] = launch;
    if (remote != nullptr)
        push_beside_remote_rows(launch);
    else
        check_cuda(push_rows(params, stream), "launching the kernel that pushes rows");
    for (size_t i = 0; i < buffers.to.size(); ++i) {
        char* const to = static_cast<char*>(buffers.to[i].untyped_data());
        copy_if_staged(params, i, to, published_memory(params, i), stream);
    }
}

void launch_reduce(const Launch& launch) {
    const auto& [params, buffers, peers, remote, stream] = launch;
    for (size_t i = 0; i < buffers.from.size(); ++i)
        copy_if_staged(params, i, published_memory(params, i), static_cast<const char*>(buffers.from[i].untyped_data()),
                       stream);
    if (remote != nullptr)
        launch.exchange_remote_rows(stream);
    for (int i = 0; i < params.num_arrays; ++i)
        if (const TransferParams part = select_dtype(params, buffers, i); part.num_arrays > 0)
            check_cuda(pull_sums(part, stream), "launching the kernels that sum rows");
}

// Returns the rows that go over NCCL, if there are any.
std::optional<RemoteRows> remote_rows(TransferParams& params, bool compares_tables, Peers& peers, cudaStream_t program,
                                      Scratch& scratch) {
    if (std::popcount(params.native) == peers.size)
        return std::nullopt;
    check(params.input_pitch == 1, "rows that lie apart cannot go over NCCL");
    const auto is_remote = [&](int peer) { return not params.is_native(peers.slots[peer]); };
    const std::string call = std::string(name_of(params.kind)) + ", call " + std::to_string(peers.calls) + " of " +
                             peers.name_of(peers.rank);
    const auto name_of_peer = [&peers](int peer) { return peers.name_of(peer); };
    const auto allocate = [&](size_t bytes) { return scratch.allocate(bytes); };
    RemoteRows rows(params, {call, is_remote, name_of_peer, allocate, compares_tables}, program);
    if (rows.is_empty())
        return std::nullopt;
    rows.add_to(params);
    return rows;
}

}  // namespace

struct Transfer::Parts {
    TransferParams params;
    Buffers buffers;
    Peers& peers;
    std::optional<RemoteRows> remote;
};

Transfer::Transfer(Kind kind, const Buffers& buffers, const TransferAttributes& attributes, const Placement& placement,
                   Peers& peers, cudaStream_t program, Scratch& scratch) {
    ++peers.calls;
    TransferParams params = to_params(kind, buffers, attributes, peers, scratch);
    if (placement.input_stride > 0)
        params.input_stride = placement.input_stride;
    params.input_pitch = placement.input_pitch;
    params.first_output_row = placement.first_output_row;
    params.keeps_empty_sums = placement.keeps_empty_sums;
    std::optional<RemoteRows> remote = remote_rows(params, placement.compares_tables, peers, program, scratch);
    parts_.reset(new Parts{params, buffers, peers, std::move(remote)});
}

Transfer::Transfer(Transfer&&) = default;
Transfer::~Transfer() = default;

bool Transfer::has_remote_rows() const {
    return parts_->remote.has_value();
}

void Transfer::launch(cudaStream_t stream) const {
    const Launch launch{.params = parts_->params,
                        .buffers = parts_->buffers,
                        .peers = parts_->peers,
                        .remote = parts_->remote ? &*parts_->remote : nullptr,
                        .stream = stream};
    (parts_->params.kind == Kind::kCast ? launch_cast : launch_reduce)(launch);
    count_transfer();
}

}  // namespace jaxmagi
