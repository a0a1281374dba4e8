#include "xla_ffi/collectives_cuda.h"

#include <cstdio>
#include <exception>

#include "csrc/collectives/peer_memory.h"
#include "xla_ffi/collectives_groups.h"
#include "xla_ffi/collectives_launch.h"

// Handlers of group casts and group reduces. The program's stream waits for a transfer in the same call.
//
// A call has three stages. Prepare requests the group's communicator from XLA. Initialize connects the peers and maps
// their memory, which takes exchanges between all ranks the first time. Execute launches. The handlers are not for
// command buffers: a graph may run branches side by side and in any order, while all ranks have to make their calls in
// one order.

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

template <Kind kKind>
constexpr const char* kHandlerName = kKind == Kind::kCast ? "jaxmagi_group_cast" : "jaxmagi_group_reduce";

template <Kind kKind> ffi::Error prepare(const CollectivesContext& context, const TransferAttributes& attributes) {
    return guarded(kHandlerName<kKind>,
                   [&] { request_communicator(context, attributes.groups, attributes.group_size); });
}

template <Kind kKind>
ffi::Error initialize(cudaStream_t program, const CollectivesContext& context, ffi::RemainingArgs arguments,
                      ffi::RemainingRets results, const TransferAttributes& attributes) {
    return guarded_aloud(kHandlerName<kKind>, [&] {
        hopper_device();
        const Buffers buffers = to_buffers(arguments, results);
        const Bootstrap bootstrap{get_communicator(context, attributes.groups, attributes.group_size), program,
                                  static_cast<uint64_t>(attributes.timeout_ms)};
        Peers& peers = connect_group({attributes.groups, attributes.group_size}, bootstrap);
        if (not may_access_processes(peers, attributes.implementation, attributes.ranks_per_host))
            return;
        size_t bytes = 0;
        for (const ffi::AnyBuffer& buffer : shared_arrays(kKind, buffers))
            bytes += buffer.size_bytes();
        std::vector<const void*> results;
        for (const ffi::AnyBuffer& buffer : buffers.to)
            results.push_back(buffer.untyped_data());
        map_peers(peers, bootstrap, bytes, results);  // XLA makes all results in its pool
    });
}

template <Kind kKind>
ffi::Error execute(cudaStream_t program, const DeviceMemory& memory, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, const TransferAttributes& attributes) {
    return guarded_aloud(kHandlerName<kKind>, [&] {
        hopper_device();
        Peers& peers = connected_group({attributes.groups, attributes.group_size});
        Scratch scratch(memory);
        const Transfer transfer(kKind, to_buffers(arguments, results), attributes, {}, peers, program, scratch);
        peers.order.begin(program);
        transfer.launch(program);
        peers.order.end(program);
    });
}

using Stream = ffi::PlatformStream<cudaStream_t>;
using Extension = ffi::Extension<Collectives>;

auto with_buffers(auto binding) {
    return std::move(binding).RemainingArgs().RemainingRets().template Attrs<TransferAttributes>();
}

template <Kind kKind> CollectiveHandlers handlers() {
    XLA_FFI_DEFINE_HANDLER(kPrepare, prepare<kKind>,
                           ffi::Ffi::BindPrepare().Ctx<Extension>().Attrs<TransferAttributes>());
    XLA_FFI_DEFINE_HANDLER(kInitialize, initialize<kKind>,
                           with_buffers(ffi::Ffi::BindInitialize().Ctx<Stream>().Ctx<Extension>()));
    XLA_FFI_DEFINE_HANDLER(kExecute, execute<kKind>,
                           with_buffers(ffi::Ffi::Bind().Ctx<Stream>().Ctx<DeviceMemory>()));
    return {kPrepare, kInitialize, kExecute};
}

}  // namespace

CollectiveHandlers group_cast_cuda() {
    return handlers<Kind::kCast>();
}

CollectiveHandlers group_reduce_cuda() {
    return handlers<Kind::kReduce>();
}

}  // namespace jaxmagi
