#include "xla_ffi/collectives_cuda.h"

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "csrc/collectives/peer_memory.h"
#include "csrc/collectives/remote_kernels.h"
#include "xla_ffi/collectives_launch.h"

// Handlers of group casts and group reduces. The program's stream waits for a transfer in the same call, or, for an
// asynchronous one, in jaxmagi_group_done: what the program does between the two calls overlaps with the transfer. All
// buffers of the start are operands of the done, so that XLA does not reuse them in between. Memory that the start has
// allocated is given back by the done.
//
// A start has three stages. Prepare requests the group's communicator from XLA. Initialize connects the peers and maps
// their memory, which takes exchanges between all ranks the first time. Execute launches. The handlers are not for
// command buffers: a graph may run branches side by side and in any order, while all ranks have to make their calls in
// one order.

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

// The groups of each device, by the ids along their mesh axis. Initialize, with which every execution begins, adds
// them. Execute takes them from here, since asking XLA for the communicator takes longer than a short transfer.
class KnownGroups {
public:
    Peers& connect(const TransferAttributes& attributes, const Bootstrap& bootstrap) {
        Peers& peers = connect_peers(current_ordinal(), bootstrap);
        const std::lock_guard lock(mutex_);
        if (not loaded_.contains(current_ordinal()))
            for (const auto preload : {preload_push, preload_pull, preload_remote_kernels})
                check_cuda(preload(), "loading the kernels");
        loaded_.insert(current_ordinal());
        groups_[key(attributes.groups, attributes.group_size)] = &peers;
        return peers;
    }

    Peers& get(DeviceIds groups, int64_t group_size) {
        const std::lock_guard lock(mutex_);
        return *groups_.at(key(groups, group_size));
    }

private:
    using Key = std::tuple<int, int64_t, std::vector<int64_t>>;

    static Key key(DeviceIds groups, int64_t group_size) {
        return {current_ordinal(), group_size, {groups.begin(), groups.end()}};
    }

    std::mutex mutex_;
    std::map<Key, Peers*> groups_;
    std::set<int> loaded_;  // devices
};

KnownGroups& known_groups() {
    static auto* const groups = new KnownGroups;  // never destroyed: handlers may outlive main
    return *groups;
}

// XLA keeps this state until the program has been launched, or has failed.
class Execution {
public:
    static ffi::TypeId id;  // set by XLA

    Execution(TransferOrder& order, int64_t transfer_id, cudaStream_t program)
        : order_(order), program_(program), number_(order.prepare(transfer_id, program)) {}
    Execution(const Execution&) = delete;

    ~Execution() {
        try {
            order_.end_execution(number_, program_);
        } catch (const std::exception&) {  // the error with which the program has ended tells more
        }
    }

private:
    TransferOrder& order_;
    const cudaStream_t program_;
    const int64_t number_;
};

ffi::TypeId Execution::id{};
ffi::TypeInfo execution_info = ffi::MakeTypeInfo<Execution>();

template <Kind kKind>
constexpr const char* kHandlerName = kKind == Kind::kCast ? "jaxmagi_group_cast_start" : "jaxmagi_group_reduce_start";

// Prints an error before XLA gets it: other ranks of this process may wait for this one until their time limit, which
// ends the process before XLA has told anybody.
template <Kind kKind, typename Body> auto guarded_aloud(Body body) {
    return guarded(kHandlerName<kKind>, [&] {
        try {
            return body();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "jaxmagi: %s\n", error.what());
            throw;
        }
    });
}

template <Kind kKind> ffi::Error prepare(const CollectivesContext& context, const TransferAttributes& attributes) {
    return guarded(kHandlerName<kKind>,
                   [&] { request_communicator(context, attributes.groups, attributes.group_size); });
}

template <Kind kKind>
auto initialize(cudaStream_t program, const CollectivesContext& context, ffi::RemainingArgs arguments,
                ffi::RemainingRets results, const TransferAttributes& attributes) {
    return guarded_aloud<kKind>([&] {
        hopper_device();
        const Buffers buffers = to_buffers(arguments, results);
        const Bootstrap bootstrap{get_communicator(context, attributes.groups, attributes.group_size), program,
                                  static_cast<uint64_t>(attributes.timeout_ms)};
        Peers& peers = known_groups().connect(attributes, bootstrap);
        auto execution = std::make_unique<Execution>(peers.order, attributes.transfer_id, program);
        if (not may_access_processes(peers, attributes))
            return execution;
        size_t bytes = 0;
        for (const ffi::AnyBuffer& buffer : shared_arrays(kKind, buffers))
            bytes += buffer.size_bytes();
        map_peers(peers, bootstrap, bytes, addresses_of(buffers.to));  // XLA makes all results in its pool
        return execution;
    });
}

template <Kind kKind>
ffi::Error execute(cudaStream_t program, const DeviceMemory& memory, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, const TransferAttributes& attributes) {
    return guarded_aloud<kKind>([&] {
        hopper_device();
        Peers& peers = known_groups().get(attributes.groups, attributes.group_size);
        if (peers.order.is_idle())
            memory.free(peers.held_memory.take_all());
        const Buffers buffers = to_buffers(arguments, results);
        auto blocks = launch_transfer(kKind, buffers, attributes, peers, program, memory);
        if (attributes.is_async)
            peers.held_memory.keep(addresses_of(buffers.to), std::move(blocks));
        else
            memory.free(blocks);
    });
}

// Waits for a transfer. The first operands are the results of its start, and must be this call's results too. Where XLA
// has moved them, the program waits nevertheless, since XLA gives the memory of both to others.
ffi::Error done(cudaStream_t program, const DeviceMemory& memory, ffi::RemainingArgs arguments,
                ffi::RemainingRets results, DeviceIds groups, int64_t group_size, int64_t transfer_id) {
    return guarded("jaxmagi_group_done", [&] {
        check(arguments.size() >= results.size(), "the end of a transfer needs its results as operands too");
        Addresses from, to;
        for (size_t i = 0; i < results.size(); ++i) {
            from.push_back(arguments.get<ffi::AnyBuffer>(i).value().untyped_data());
            to.push_back(results.get<ffi::AnyBuffer>(i).value()->untyped_data());
        }
        Peers& peers = known_groups().get(groups, group_size);
        peers.order.wait(program, transfer_id, from);
        memory.free(peers.held_memory.take(from));
        check(from == to, "the end of a transfer needs its results where the start has them, but XLA has moved them");
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

XLA_FFI_DEFINE_HANDLER(kDone, done,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Ctx<DeviceMemory>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<DeviceIds>("groups")
                           .Attr<int64_t>("group_size")
                           .Attr<int64_t>("transfer_id"));

}  // namespace

CollectiveHandlers group_cast_cuda() {
    return handlers<Kind::kCast>();
}

CollectiveHandlers group_reduce_cuda() {
    return handlers<Kind::kReduce>();
}

XLA_FFI_Handler* group_done_cuda() {
    return kDone;
}

StateType group_execution_cuda() {
    return {&Execution::id, &execution_info};
}

}  // namespace jaxmagi
