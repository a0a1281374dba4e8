#pragma once

#include <exception>
#include <vector>

#include "csrc/collectives/peers.h"
#include "csrc/collectives/transfer_params.h"
#include "xla_ffi/communicator.h"
#include "xla_ffi/cuda_checks.h"
#include "xla_ffi/device_memory.h"

// Turns the buffers and attributes of a group cast or group reduce into the parameters of its kernels.

namespace jaxmagi {

using collectives::Kind;

enum class Implementation : int64_t { kAuto, kNative, kNccl };

struct TransferAttributes {
    DeviceIds groups;
    int64_t group_size, input_rows, output_rows, pair_rows, num_sms;
    Implementation implementation;
    int64_t ranks_per_host, timeout_ms;
};

struct Buffers {
    xla::ffi::AnyBuffer sends, receives;
    std::vector<xla::ffi::AnyBuffer> from, to;
};

Buffers to_buffers(const xla::ffi::RemainingArgs& arguments, const xla::ffi::RemainingRets& results);

// Returns the arrays that peers access: the results of a cast, the operands of a reduction.
const std::vector<xla::ffi::AnyBuffer>& shared_arrays(Kind kind, const Buffers& buffers);

// Memory of XLA's that a transfer needs beside its arrays. If there is too little, this rank alone throws, and the
// others wait for it until their time limit.
class Scratch {
public:
    explicit Scratch(const DeviceMemory& memory) : memory_(memory) {}
    Scratch(const Scratch&) = delete;
    ~Scratch() {
        try {
            memory_.free(blocks_);
        } catch (const std::exception&) {  // there is an error already, or `take` would have been called
        }
    }

    void* allocate(size_t bytes) {
        blocks_.push_back(memory_.allocate(bytes));
        return blocks_.back().data;
    }

private:
    const DeviceMemory& memory_;
    std::vector<MemoryBlock> blocks_;
};

// Returns whether any rank of the group may access arrays of another process. It is the same on all ranks, since all
// map each other's memory or none does. A rank alone on its host has no use for that.
bool may_access_processes(const collectives::Peers& peers, Implementation implementation, int64_t ranks_per_host);

// Returns whether all ranks of the group move rows by kernels. It is the same on all ranks.
bool are_all_native(const collectives::Peers& peers, Implementation implementation, int64_t ranks_per_host);

// How the ranks of a group make a call.
struct GroupCall {
    Kind kind;
    Implementation implementation;
    int64_t ranks_per_host, timeout_ms;
};

// Returns the parameters of a call that concern the group alone, without arrays. `hash` is equal on all ranks that make
// the same call.
collectives::TransferParams to_group_params(const GroupCall& call, uint64_t hash, const collectives::Peers& peers);

// Sets the addresses by which peers access these arrays of the rank, which are the first of the call. Peers access
// arrays that they cannot reach in staging buffers or in `scratch` instead.
void publish_arrays(collectives::TransferParams& params, const std::vector<xla::ffi::AnyBuffer>& shared,
                    collectives::Peers& peers, Scratch& scratch);

// Peers access arrays that they cannot reach in staging buffers or in `scratch` instead.
collectives::TransferParams to_params(Kind kind, const Buffers& buffers, const TransferAttributes& attributes,
                                      collectives::Peers& peers, Scratch& scratch);

// Returns the element type of an array that is summed.
collectives::DType summed_dtype(const xla::ffi::AnyBuffer& buffer);

}  // namespace jaxmagi

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jaxmagi::Implementation);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmagi::TransferAttributes, StructMember<jaxmagi::DeviceIds>("groups"), StructMember<int64_t>("group_size"),
    StructMember<int64_t>("input_rows"), StructMember<int64_t>("output_rows"),
    StructMember<int64_t>("pair_rows"), StructMember<int64_t>("num_sms"),
    StructMember<jaxmagi::Implementation>("implementation"), StructMember<int64_t>("ranks_per_host"),
    StructMember<int64_t>("timeout_ms"));
