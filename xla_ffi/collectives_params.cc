#include "xla_ffi/collectives_params.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "csrc/common/hash.h"

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

constexpr int64_t kRowUnit = 16;  // bytes

// SMs that are left to NCCL, which has at most as many CTAs here. If all SMs waited for native peers, and one of these
// for a rank whose NCCL kernel has no SM, they would wait forever.
constexpr int kNcclSms = 32;

int64_t row_bytes_of(const ffi::AnyBuffer& buffer) {
    return buffer.dimensions()[2] * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
}

// --- checks ---

void check_array(Kind kind, const ffi::AnyBuffer& from, const ffi::AnyBuffer& to, int64_t batch,
                 const TransferAttributes& attributes) {
    check_rank("an array", from, 3);
    const int64_t width = from.dimensions()[2];
    const bool is_cast = kind == Kind::kCast;
    check_shape("an array", from, {batch, is_cast ? attributes.input_rows : attributes.output_rows, width});
    check_shape("a result", to, {batch, is_cast ? attributes.output_rows : attributes.input_rows, width});
    to_int("the bytes of a row", row_bytes_of(from), kRowUnit);
    check(row_bytes_of(from) % kRowUnit == 0, "rows must be multiples of 16 bytes, got ", row_bytes_of(from));
    if (is_cast)
        check_type("a result", to, from.element_type());
}

void check_buffers(Kind kind, const Buffers& buffers, const TransferAttributes& attributes) {
    check_type("sends", buffers.sends, ffi::S32);
    check_rank("sends", buffers.sends, 3);
    const int64_t batch = buffers.sends.dimensions()[0], entries = buffers.sends.dimensions()[1];
    check_shape("sends", buffers.sends, {batch, entries, 5});
    check_type("receives", buffers.receives, ffi::S32);
    check_shape("receives", buffers.receives, {batch, entries, 4});
    to_int("the batch size", batch, 1);
    to_int("the number of entries", entries, 0);
    to_int("input_rows", attributes.input_rows, 1);
    to_int("output_rows", attributes.output_rows, 1);
    to_int("pair_rows", attributes.pair_rows, 0);
    for (size_t i = 0; i < buffers.from.size(); ++i)
        check_array(kind, buffers.from[i], buffers.to[i], batch, attributes);
}

// --- parameters ---

// Returns the bit mask of slots that the kernels serve; all other ranks are left to NCCL.
uint64_t native_slots(const GroupCall& call, const Peers& peers) {
    const int64_t per_host = call.ranks_per_host;  // 0 if all ranks count as one host
    uint64_t native = 0;
    for (int peer = 0; peer < peers.size; ++peer) {
        const int slot = peers.slots[peer];
        const bool is_self = peer == peers.rank;
        const bool is_one_host = per_host == 0 or peers.rank / per_host == peer / per_host;
        const bool is_reached = is_self or (slot >= 0 and peers.is_reachable[slot] and is_one_host);
        if (not is_reached and call.implementation == Implementation::kNative)
            fail("implementation='native': ", peers.who(), " does not reach the memory of ", peers.name_of(peer));
        if (is_reached and (is_self or call.implementation != Implementation::kNccl))
            native |= uint64_t{1} << slot;
    }
    return native;
}

// Returns a number that is equal on all ranks which make the same call.
uint64_t hash_of(Kind kind, const Buffers& buffers, const TransferAttributes& attributes) {
    Hash hash;
    hash.add(static_cast<uint64_t>(kind));
    for (const int64_t number : {attributes.input_rows, attributes.output_rows, attributes.pair_rows})
        hash.add(number);
    for (const int64_t size : buffers.sends.dimensions())
        hash.add(size);
    for (const ffi::AnyBuffer& buffer : buffers.from) {
        hash.add(static_cast<uint64_t>(buffer.element_type()));
        hash.add(row_bytes_of(buffer));
    }
    return hash.value();
}

void set_arrays(TransferParams& params, const Buffers& buffers) {
    params.num_arrays = static_cast<int>(buffers.from.size());
    for (int i = 0; i < params.num_arrays; ++i)
        params.arrays[i] = {.from = data_of<const char>("an array", buffers.from[i], kRowUnit),
                            .to = data_of<char>("a result", buffers.to[i], kRowUnit),
                            .row_bytes = static_cast<int>(row_bytes_of(buffers.from[i])),
                            .incoming_offset = 0};
}

// --- published addresses ---

// XLA makes all arrays in its pool, except for constants of a program and arrays of other libraries. Arrays that peers
// cannot access are copied to `scratch`, which is in the pool.

uint64_t publish_address(const TransferParams& params, const ffi::AnyBuffer& buffer, Peers& peers, Scratch& scratch) {
    const void* shared = buffer.untyped_data();
    if (params.has_native_peers() and not is_accessible(peers, shared))
        shared = scratch.allocate(buffer.size_bytes());
    check(not params.has_native_peers() or is_accessible(peers, shared),
          "the GPUs of this process do not reach each other's memory as XLA's allocator made it: use "
          "implementation='nccl' or, for a product with a collective, 'xla'");
    return reinterpret_cast<uint64_t>(shared);
}

uint64_t publish_offset_in_pool(const ffi::AnyBuffer& buffer, const Peers& peers, Scratch& scratch) {
    const Pool pool{peers.shared[peers.slot], peers.shared_bytes[peers.slot]};
    const size_t bytes = buffer.size_bytes();
    const void* shared = buffer.untyped_data();
    if (not pool.contains(shared, bytes))
        shared = scratch.allocate(bytes);
    if (not pool.contains(shared, bytes))
        throw std::runtime_error("an array of " + std::to_string(bytes) + " bytes is not in the " +
                                 std::to_string(pool.bytes) +
                                 " bytes of memory that XLA took in advance, which the processes of the group share: "
                                 "set XLA_PYTHON_CLIENT_PREALLOCATE=false, or use implementation='nccl'");
    return kIsOffset | static_cast<uint64_t>(static_cast<const char*>(shared) - pool.begin);
}

}  // namespace

Buffers to_buffers(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results) {
    const size_t num_arrays = results.size();
    check(arguments.size() == num_arrays + 2 and 1 <= num_arrays and num_arrays <= kMaxArrays,
          "there must be sends, receives and 1 to ", kMaxArrays, " arrays, and as many results, got ", arguments.size(),
          " and ", results.size(), " buffers");
    std::vector<ffi::AnyBuffer> from, to;
    for (size_t i = 0; i < num_arrays; ++i) {
        from.push_back(arguments.get<ffi::AnyBuffer>(i + 2).value());
        to.push_back(*results.get<ffi::AnyBuffer>(i).value());
    }
    return {arguments.get<ffi::AnyBuffer>(0).value(), arguments.get<ffi::AnyBuffer>(1).value(), std::move(from),
            std::move(to)};
}

const std::vector<ffi::AnyBuffer>& shared_arrays(Kind kind, const Buffers& buffers) {
    return kind == Kind::kCast ? buffers.to : buffers.from;
}

bool may_access_processes(const Peers& peers, Implementation implementation, int64_t ranks_per_host) {
    return not peers.is_one_process and implementation != Implementation::kNccl and ranks_per_host != 1;
}

bool are_all_native(const Peers& peers, Implementation implementation, int64_t ranks_per_host) {
    return peers.is_one_host and implementation != Implementation::kNccl and
           (ranks_per_host == 0 or ranks_per_host >= peers.size);
}

TransferParams to_group_params(const GroupCall& call, uint64_t hash, const Peers& peers) {
    TransferParams params{};
    params.kind = call.kind;
    params.host_name = peers.device_host_name;
    params.rank = peers.rank;
    params.size = peers.size;
    params.slot = peers.slot;
    params.num_slots = peers.num_slots();
    params.slots = peers.device_slots;
    std::ranges::copy(peers.ranks, params.ranks);
    params.native = native_slots(call, peers);
    params.call_hash = hash;
    params.call = peers.calls;
    params.timeout_ns = static_cast<uint64_t>(to_int("timeout_ms", call.timeout_ms, 1)) * 1'000'000;
    std::ranges::copy(peers.control, params.controls);
    std::ranges::copy(peers.shared, params.shared);
    return params;
}

void publish_arrays(TransferParams& params, const std::vector<ffi::AnyBuffer>& shared, Peers& peers, Scratch& scratch) {
    const bool crosses_processes = std::popcount(params.native) > 1 and not peers.is_one_process;
    uint64_t staged = 0;
    for (size_t i = 0; i < shared.size(); ++i) {
        if (not crosses_processes)
            params.published[i] = publish_address(params, shared[i], peers, scratch);
        else if (peers.sharing == Sharing::kXlaPools)
            params.published[i] = publish_offset_in_pool(shared[i], peers, scratch);
        else
            params.published[i] = kIsOffset | std::exchange(staged, staged + shared[i].size_bytes());
    }
    if (staged > peers.shared_bytes[peers.slot])
        throw std::runtime_error("the staging buffer has " + std::to_string(peers.shared_bytes[peers.slot]) +
                                 " bytes, and the call needs " + std::to_string(staged));
}

TransferParams to_params(Kind kind, const Buffers& buffers, const TransferAttributes& attributes, Peers& peers,
                         Scratch& scratch) {
    check_buffers(kind, buffers, attributes);
    const GroupCall call{kind, attributes.implementation, attributes.ranks_per_host, attributes.timeout_ms};
    TransferParams params = to_group_params(call, hash_of(kind, buffers, attributes), peers);
    params.sends = data_of<const Send>("sends", buffers.sends);
    params.receives = data_of<const Receive>("receives", buffers.receives);
    params.batch = static_cast<int>(buffers.sends.dimensions()[0]);
    params.entries = static_cast<int>(buffers.sends.dimensions()[1]);
    params.input_rows = static_cast<int>(attributes.input_rows);
    params.output_rows = static_cast<int>(attributes.output_rows);
    params.pair_rows = static_cast<int>(attributes.pair_rows);
    params.input_stride = params.input_rows;
    params.input_pitch = 1;
    params.num_sms = to_int("num_sms", attributes.num_sms, 1, hopper_device().num_sms);
    if (std::popcount(params.native) < peers.size)
        params.num_sms = std::min(params.num_sms, hopper_device().num_sms - kNcclSms);
    set_arrays(params, buffers);
    publish_arrays(params, shared_arrays(kind, buffers), peers, scratch);
    return params;
}

DType summed_dtype(const ffi::AnyBuffer& buffer) {
    switch (buffer.element_type()) {
        case ffi::BF16: return DType::kBF16;
        case ffi::F16: return DType::kF16;
        case ffi::F32: return DType::kF32;
        case ffi::F64: return DType::kF64;
        default:
            fail("arrays to be added up must be bf16, f16, f32 or f64, got ", buffer.element_type());
    }
}

}  // namespace jaxmagi
