#pragma once

#include <vector>

#include "csrc/collectives/transfer.h"
#include "xla_ffi/communicator.h"
#include "xla_ffi/cuda_checks.h"

// From the buffers and attributes of a call to what the kernels take.

namespace jaxmagi {

enum class Kind { kCast, kReduce };

struct Attributes {
    DeviceIds groups;
    int64_t group_size, input_rows, output_rows, pair_rows, num_sms, implementation, ranks_per_host, timeout_ms;
    int64_t transfer;  // see `TransferOrder`
    bool is_apart;     // another call waits for it
    bool goes_first;   // what the program does next waits until the transfer has its multiprocessors
};

struct Buffers {
    xla::ffi::AnyBuffer sends, receives;
    std::vector<xla::ffi::AnyBuffer> from, to;
    xla::ffi::AnyBuffer workspace;
};

Buffers to_buffers(const xla::ffi::RemainingArgs& arguments, const xla::ffi::RemainingRets& results);

// What peers read or write of a call: the results of a cast, the operands of a reduction.
const std::vector<xla::ffi::AnyBuffer>& shared_side(Kind kind, const Buffers& buffers);

// A bit for each rank that the kernels serve; the others are left to NCCL.
uint64_t native_ranks(const collectives::Peers& peers, const Attributes& attributes);

// Memory of XLA's for the length of a call: the program gets it back when the call has returned. If there is too
// little, this rank alone throws, and the others wait for it in vain.
class Scratch {
public:
    explicit Scratch(xla::ffi::ScratchAllocator& allocator) : allocator_(allocator) {}

    void* allocate(size_t bytes);
    bool is_used() const { return is_used_; }

private:
    xla::ffi::ScratchAllocator& allocator_;
    bool is_used_ = false;
};

// Whether any rank of the group may use buffers of another process: the same on all of them, since all ranks share
// theirs or none does. A rank alone on its host has no use for that.
bool group_shares_buffers(const collectives::Peers& peers, const Attributes& attributes);

// Where the shared side cannot be used as it is, the places are in an arena or in `scratch`.
collectives::Transfer to_transfer(Kind kind, const Buffers& buffers, const Attributes& attributes,
                                  collectives::Peers& peers, Scratch& scratch);

// The numbers of an array that is added up.
collectives::Number number_of(const xla::ffi::AnyBuffer& buffer);

}  // namespace jaxmagi
