#pragma once

#include <vector>

#include "csrc/collectives/peer_memory.h"
#include "xla_ffi/context_cuda.h"
#include "xla_ffi/context_transfers.h"

// Handlers of context attention, one for each pass, which hold transfers and attention. Nothing is under way when a
// call returns but what the program's stream waits for.
//
// Attention is cut into parts of the heads (context_parts.h), but for the backward pass within a host, which has one
// unless parts share workspaces. The keys of all parts travel from the beginning on, those of the first part first.
// Tiles that need no received keys are computed before or behind those that do (context_forward.h, context_backward.h),
// so that there is something to compute while rows travel.
//
// Attention is launched several times, each time when the launch before has no work left to begin with: streams wait
// for events, and for flags that kernels of attention set. No kernel of attention waits for a transfer, so that no
// transfer ever lacks a multiprocessor because of such a wait, also not by way of other kernels that wait for each
// other. Launches leave multiprocessors free while there is something to transfer, which then help the launch that
// computes.
//
// The stages are those of other collectives (collectives_cuda.cc). Prepare requests communicators, Initialize connects
// peers, and Execute launches. `Pass` has the target's name, its buffers, the kernels' parameters for a part, and the
// functions that load and launch the kernels.

namespace jaxmagi {

inline void check_launch(cudaError_t error) {
    check_cuda(error, "launching the kernels");
}

inline void clear(const ffi::AnyBuffer& buffer, cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(buffer.untyped_data(), 0, buffer.size_bytes(), stream), "clearing counters");
}

inline size_t size_bytes(const KeysValues& arrays) {
    return arrays.k.size_bytes() + arrays.v.size_bytes();
}

// Holds the attributes that `set_tensors` reads.
struct KernelAttributes {
    double scale, soft_cap;
    int64_t sm_margin;

    static KernelAttributes of(const ContextAttributes& attributes) {
        return {attributes.scale, attributes.soft_cap, 0};
    }
};

// How many multiprocessors attention leaves to NCCL. Rows travel between hosts all the while that it computes: with 16
// free ones a causal backward pass took 1.18 to 1.27 times as long as attention or transfer alone, with 4 0.96 to 1.11
// times. Forward passes took as long with 4, 8 and 16 (docs/log/context.md). NCCL has a few CTAs for a peer, of which a
// multiprocessor holds several. Those that find none wait for a launch of attention to end, and no CTA of attention
// waits for them.
inline constexpr int kMostNetworkSms = 4;

// Returns how many multiprocessors attention leaves free while there is something to transfer: those of transfers, or
// as many as NCCL needs if it brings all rows.
inline int reserved_sms(const ContextAttributes& attributes, const Parts& parts) {
    const int num_sms = to_int("num_sms", attributes.num_sms, 1, hopper_device().num_sms - 1);
    return parts.have_native_peers ? num_sms : std::min(num_sms, kMostNetworkSms);
}

// Returns the groups in which a call transfers.
inline std::vector<GroupIds> groups_of(const ContextAttributes& attributes) {
    std::vector<GroupIds> groups{attributes.across()};
    if (attributes.has_two_steps())
        groups.push_back(attributes.inside());
    return groups;
}

template <typename Pass>
ffi::Error prepare_context(const CollectivesContext& context, const ContextAttributes& attributes) {
    return guarded(Pass::kTarget, [&] {
        for (const GroupIds& group : groups_of(attributes))
            request_communicator(context, group.ids, group.size);
    });
}

// Returns the parts of a call. They are equal on all ranks.
template <typename Pass>
Parts parts_of(const ContextAttributes& attributes, const collectives::Peers& peers,
               const typename Pass::Operands& operands, const typename Pass::Results& results) {
    const Implementation implementation = attributes.implementation;
    Parts parts = Parts::of(attributes, operands.q, Pass::keys(results).k);
    parts.are_within_host =
        not attributes.has_two_steps() and are_all_native(peers, implementation, attributes.ranks_per_host);
    parts.have_native_peers = attributes.inside_group_size > 1 or
                              (peers.num_slots() > 1 and implementation != Implementation::kNccl and
                               attributes.ranks_per_host != 1);
    return parts.are_within_host ? parts.with_count(attributes.num_parts_within_host) : parts;
}

// Connects the groups of a call, and lets their ranks access each other's arrays.
template <typename Pass>
void connect_context(const CollectivesContext& context, cudaStream_t program, const ContextAttributes& attributes,
                     const typename Pass::Operands& operands, const typename Pass::Results& results) {
    using namespace collectives;
    const KeysValues& keys = Pass::keys(results);
    const void* const addresses[] = {keys.k.untyped_data(), keys.v.untyped_data()};
    for (const GroupIds& group : groups_of(attributes)) {
        const Bootstrap bootstrap{get_communicator(context, group.ids, group.size), program,
                                  static_cast<uint64_t>(attributes.timeout_ms)};
        Peers& peers = connect_group(group, bootstrap);
        const Parts parts = parts_of<Pass>(attributes, peers, operands, results);
        if (may_access_processes(peers, attributes.implementation, attributes.ranks_per_host))
            map_peers(peers, bootstrap, Pass::shared_bytes(results) / parts.count, addresses);
    }
}

template <typename Pass>
ffi::Error initialize_context(cudaStream_t program, const CollectivesContext& context, ffi::RemainingArgs arguments,
                              ffi::RemainingRets rets, const ContextAttributes& attributes) {
    return guarded_aloud(Pass::kTarget, [&] {
        hopper_device();
        const auto operands = decode_buffers<typename Pass::Operands>(arguments);
        const auto results = decode_buffers<typename Pass::Results>(rets);
        const Parts parts = Parts::of(attributes, operands.q, Pass::keys(results).k);
        check_cuda(Pass::preload(Pass::to_params(attributes, parts, operands, results, 0)), "loading the kernels");
        connect_context<Pass>(context, program, attributes, operands, results);
    });
}

template <typename Pass>
ffi::Error execute_context(cudaStream_t program, const DeviceMemory& memory, ffi::RemainingArgs arguments,
                           ffi::RemainingRets rets, const ContextAttributes& attributes) {
    return guarded_aloud(Pass::kTarget, [&] {
        hopper_device();
        const auto operands = decode_buffers<typename Pass::Operands>(arguments);
        const auto results = decode_buffers<typename Pass::Results>(rets);
        const Parts parts = parts_of<Pass>(attributes, connected_group(attributes.across()), operands, results);
        std::vector<collectives::TransferOrder*> orders;
        for (const GroupIds& group : groups_of(attributes))
            orders.push_back(&connected_group(group).order);
        Scratch scratch(memory);
        ContextFork fork(orders, program);
        ContextTransfers transfers(attributes, parts, operands.tables, fork, scratch);
        Pass::launch(attributes, parts, operands, results, fork, transfers);
        fork.join();
    });
}

auto with_context_buffers(auto binding) {
    return std::move(binding).RemainingArgs().RemainingRets().template Attrs<ContextAttributes>();
}

template <typename Pass> CollectiveHandlers context_handlers() {
    using Stream = ffi::PlatformStream<cudaStream_t>;
    using Extension = ffi::Extension<Collectives>;
    XLA_FFI_DEFINE_HANDLER(kPrepare, prepare_context<Pass>,
                           ffi::Ffi::BindPrepare().Ctx<Extension>().Attrs<ContextAttributes>());
    XLA_FFI_DEFINE_HANDLER(kInitialize, initialize_context<Pass>,
                           with_context_buffers(ffi::Ffi::BindInitialize().Ctx<Stream>().Ctx<Extension>()));
    XLA_FFI_DEFINE_HANDLER(kExecute, execute_context<Pass>,
                           with_context_buffers(ffi::Ffi::Bind().Ctx<Stream>().Ctx<DeviceMemory>()));
    return {kPrepare, kInitialize, kExecute};
}

}  // namespace jaxmagi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmagi::ContextAttributes, StructMember<jaxmagi::DeviceIds>("groups"),
    StructMember<jaxmagi::DeviceIds>("inside_groups"), StructMember<int64_t>("group_size"),
    StructMember<int64_t>("inside_group_size"), StructMember<int64_t>("input_rows"),
    StructMember<int64_t>("middle_rows"), StructMember<int64_t>("output_rows"), StructMember<int64_t>("pair_rows"),
    StructMember<int64_t>("inside_pair_rows"), StructMember<int64_t>("num_sms"),
    StructMember<jaxmagi::Implementation>("implementation"), StructMember<int64_t>("ranks_per_host"),
    StructMember<int64_t>("timeout_ms"), StructMember<int64_t>("num_parts"),
    StructMember<int64_t>("num_parts_within_host"), StructMember<int64_t>("num_workspaces"),
    StructMember<double>("scale"), StructMember<double>("soft_cap"), StructMember<bool>("deterministic"));
