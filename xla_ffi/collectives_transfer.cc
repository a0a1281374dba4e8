#include "xla_ffi/collectives_transfer.h"

#include <bit>
#include <utility>

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

constexpr int64_t kRowUnit = 16;  // bytes

// As the attribute has it.
enum class Implementation { kAuto, kNative, kNccl };

int64_t bytes_of(const ffi::AnyBuffer& buffer) {
    return static_cast<int64_t>(buffer.size_bytes());
}

int64_t row_bytes_of(const ffi::AnyBuffer& buffer) {
    return buffer.dimensions()[2] * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
}

// --- checks ---

void check_array(Kind kind, const ffi::AnyBuffer& from, const ffi::AnyBuffer& to, int64_t groups,
                 const Attributes& attributes) {
    check_rank("an array", from, 3);
    const int64_t width = from.dimensions()[2];
    const bool is_cast = kind == Kind::kCast;
    check_shape("an array", from, {groups, is_cast ? attributes.input_rows : attributes.output_rows, width});
    check_shape("a result", to, {groups, is_cast ? attributes.output_rows : attributes.input_rows, width});
    to_int("the bytes of a row", row_bytes_of(from), kRowUnit);
    check(row_bytes_of(from) % kRowUnit == 0,
          "rows must be multiples of 16 bytes, got " + std::to_string(row_bytes_of(from)));
    if (is_cast)
        check_type("a result", to, from.element_type());
}

void check_buffers(Kind kind, const Buffers& buffers, const Attributes& attributes) {
    check_type("sends", buffers.sends, ffi::S32);
    check_rank("sends", buffers.sends, 3);
    const int64_t groups = buffers.sends.dimensions()[0], entries = buffers.sends.dimensions()[1];
    check_shape("sends", buffers.sends, {groups, entries, 5});
    check_type("receives", buffers.receives, ffi::S32);
    check_shape("receives", buffers.receives, {groups, entries, 4});
    to_int("the number of transfers", groups, 1);
    to_int("the number of entries", entries, 0);
    to_int("input_rows", attributes.input_rows, 1);
    to_int("output_rows", attributes.output_rows, 1);
    to_int("pair_rows", attributes.pair_rows, 0);
    for (size_t i = 0; i < buffers.from.size(); ++i)
        check_array(kind, buffers.from[i], buffers.to[i], groups, attributes);
}

// --- parts of a transfer ---

bool is_one_host(int64_t ranks_per_host, int first, int second) {
    return ranks_per_host == 0 or first / ranks_per_host == second / ranks_per_host;
}

// The same on all ranks that make the same call.
uint64_t hash_of(Kind kind, const Buffers& buffers, const Attributes& attributes) {
    uint64_t hash = 14695981039346656037u;  // FNV-1a, by numbers instead of bytes
    const auto add = [&](int64_t number) { hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u; };
    add(static_cast<int64_t>(kind));
    for (const int64_t number : {attributes.input_rows, attributes.output_rows, attributes.pair_rows})
        add(number);
    for (const int64_t size : buffers.sends.dimensions())
        add(size);
    for (const ffi::AnyBuffer& buffer : buffers.from) {
        add(static_cast<int64_t>(buffer.element_type()));
        add(row_bytes_of(buffer));
    }
    return hash;
}

void set_arrays(Transfer& transfer, const Buffers& buffers) {
    transfer.num_arrays = static_cast<int>(buffers.from.size());
    transfer.pair_bytes = sizeof(PairHeader);
    for (int i = 0; i < transfer.num_arrays; ++i) {
        const int row_bytes = static_cast<int>(row_bytes_of(buffers.from[i]));
        transfer.arrays[i] = {.from = data_of<const char>("an array", buffers.from[i], kRowUnit),
                              .to = data_of<char>("a result", buffers.to[i], kRowUnit),
                              .row_bytes = row_bytes,
                              .pair_offset = transfer.pair_bytes};
        transfer.pair_bytes += int64_t{transfer.groups} * transfer.pair_rows * row_bytes;
    }
}

void set_pair_buffers(Transfer& transfer, const Buffers& buffers) {
    const int64_t half = transfer.pair_bytes * transfer.size;
    check(bytes_of(buffers.workspace) >= 2 * half,
          "ranks that do not reach each other's memory need a workspace of " + std::to_string(2 * half) +
              " bytes, got " + std::to_string(bytes_of(buffers.workspace)) + ": use implementation='nccl'");
    transfer.outgoing = data_of<char>("the workspace", buffers.workspace, kRowUnit);
    transfer.incoming = transfer.outgoing + half;
}

void set_peers(Transfer& transfer, const Peers& peers) {
    for (int peer = 0; peer < std::min(peers.size, kMaxRanks); ++peer) {
        transfer.controls[peer] = reinterpret_cast<Control*>(peers.control[peer]);
        transfer.shared[peer] = peers.shared[peer];
    }
}

bool crosses_processes(uint64_t native, const Peers& peers) {
    return std::popcount(native) > 1 and not peers.shares_process;
}

// XLA makes all arrays in its pool but constants of a program; those of other libraries are elsewhere too.

uint64_t place_by_address(const Transfer& transfer, const ffi::AnyBuffer& buffer, Peers& peers, Scratch& scratch) {
    const void* shared = buffer.untyped_data();
    if (transfer.has_native_peers() and not is_accessible(peers, shared))
        shared = scratch.allocate(buffer.size_bytes());
    check(not transfer.has_native_peers() or is_accessible(peers, shared),
          "the GPUs of this process do not reach each other's memory as XLA's allocator made it: use "
          "implementation='nccl'");
    return reinterpret_cast<uint64_t>(shared);
}

uint64_t place_in_pool(const ffi::AnyBuffer& buffer, const Peers& peers, Scratch& scratch) {
    const Pool pool{peers.shared[peers.rank], peers.shared_bytes[peers.rank]};
    const size_t bytes = buffer.size_bytes();
    const void* shared = buffer.untyped_data();
    if (not pool.contains(shared, bytes))
        shared = scratch.allocate(bytes);
    if (not pool.contains(shared, bytes))
        throw std::runtime_error("an array of " + std::to_string(bytes) + " bytes is not in the " +
                                 std::to_string(pool.bytes) +
                                 " bytes of memory that XLA took in advance, which the processes of the group share: "
                                 "set XLA_PYTHON_CLIENT_PREALLOCATE=false, or use implementation='nccl'");
    return kInShared | static_cast<uint64_t>(static_cast<const char*>(shared) - pool.begin);
}

void set_places(Transfer& transfer, const std::vector<ffi::AnyBuffer>& shared, Peers& peers, Scratch& scratch) {
    uint64_t in_arena = 0;
    for (int i = 0; i < transfer.num_arrays; ++i) {
        if (not crosses_processes(transfer.native, peers))
            transfer.places[i] = place_by_address(transfer, shared[i], peers, scratch);
        else if (peers.sharing == Sharing::kPools)
            transfer.places[i] = place_in_pool(shared[i], peers, scratch);
        else
            transfer.places[i] = kInShared | std::exchange(in_arena, in_arena + shared[i].size_bytes());
    }
    if (in_arena > peers.shared_bytes[peers.rank])
        throw std::runtime_error("the arena has " + std::to_string(peers.shared_bytes[peers.rank]) +
                                 " bytes, and the call needs " + std::to_string(in_arena));
}

}  // namespace

void* Scratch::allocate(size_t bytes) {
    is_used_ = true;
    const auto memory = allocator_.Allocate(bytes, kRowUnit);
    if (not memory)
        throw std::runtime_error("XLA has no " + std::to_string(bytes) +
                                 " bytes left to copy an array to that is not in its memory pool");
    return *memory;
}

Buffers to_buffers(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results) {
    const size_t num_arrays = results.size() - 1;
    check(arguments.size() == num_arrays + 2 and 1 <= num_arrays and num_arrays <= kMaxArrays,
          "there must be sends, receives and 1 to " + std::to_string(kMaxArrays) +
              " arrays, and as many results and a workspace, got " + std::to_string(arguments.size()) + " and " +
              std::to_string(results.size()) + " buffers");
    std::vector<ffi::AnyBuffer> from, to;
    for (size_t i = 0; i < num_arrays; ++i) {
        from.push_back(arguments.get<ffi::AnyBuffer>(i + 2).value());
        to.push_back(*results.get<ffi::AnyBuffer>(i).value());
    }
    return {arguments.get<ffi::AnyBuffer>(0).value(), arguments.get<ffi::AnyBuffer>(1).value(), std::move(from),
            std::move(to), *results.get<ffi::AnyBuffer>(num_arrays).value()};
}

const std::vector<ffi::AnyBuffer>& shared_side(Kind kind, const Buffers& buffers) {
    return kind == Kind::kCast ? buffers.to : buffers.from;
}

uint64_t native_ranks(const Peers& peers, const Attributes& attributes) {
    const auto implementation = static_cast<Implementation>(attributes.implementation);
    uint64_t native = 0;
    for (int peer = 0; peer < peers.size; ++peer) {
        const bool is_self = peer == peers.rank;
        const bool is_reached = is_self or (peer < kMaxRanks and peers.is_reachable[peer] and
                                            is_one_host(attributes.ranks_per_host, peers.rank, peer));
        check(is_reached or implementation != Implementation::kNative,
              "implementation='native': rank " + std::to_string(peers.rank) + " does not reach the memory of rank " +
                  std::to_string(peer) + " of " + std::to_string(peers.size));
        if (peer < kMaxRanks and is_reached and (is_self or implementation != Implementation::kNccl))
            native |= uint64_t{1} << peer;
    }
    return native;
}

bool group_shares_buffers(const Peers& peers, const Attributes& attributes) {
    const auto implementation = static_cast<Implementation>(attributes.implementation);
    return not peers.shares_process and implementation != Implementation::kNccl and attributes.ranks_per_host != 1;
}

Transfer to_transfer(Kind kind, const Buffers& buffers, const Attributes& attributes, Peers& peers, Scratch& scratch) {
    check_buffers(kind, buffers, attributes);
    check(peers.size <= kMaxRanks, "groups of more than " + std::to_string(kMaxRanks) + " ranks are not supported");
    Transfer transfer{};
    transfer.rank = peers.rank;
    transfer.size = peers.size;
    transfer.native = native_ranks(peers, attributes);
    transfer.sends = data_of<const Send>("sends", buffers.sends);
    transfer.receives = data_of<const Receive>("receives", buffers.receives);
    transfer.groups = static_cast<int>(buffers.sends.dimensions()[0]);
    transfer.entries = static_cast<int>(buffers.sends.dimensions()[1]);
    transfer.input_rows = static_cast<int>(attributes.input_rows);
    transfer.output_rows = static_cast<int>(attributes.output_rows);
    transfer.pair_rows = static_cast<int>(attributes.pair_rows);
    transfer.call = hash_of(kind, buffers, attributes);
    transfer.timeout_ns = static_cast<uint64_t>(to_int("timeout_ms", attributes.timeout_ms, 1)) * 1'000'000;
    transfer.num_sms = to_int("num_sms", attributes.num_sms, 1, hopper_device().num_sms);
    set_arrays(transfer, buffers);
    if (std::popcount(transfer.native) < peers.size)
        set_pair_buffers(transfer, buffers);
    set_peers(transfer, peers);
    set_places(transfer, shared_side(kind, buffers), peers, scratch);
    return transfer;
}

Number number_of(const ffi::AnyBuffer& buffer) {
    switch (buffer.element_type()) {
        case ffi::BF16: return Number::kBF16;
        case ffi::F16: return Number::kF16;
        case ffi::F32: return Number::kF32;
        case ffi::F64: return Number::kF64;
        default:
            throw std::invalid_argument("arrays to be added up must be bf16, f16, f32 or f64, got " +
                                        type_name(buffer.element_type()));
    }
}

}  // namespace jaxmagi
