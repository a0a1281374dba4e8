#include "xla_ffi/collectives_cuda.h"

#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <tuple>

#include "csrc/collectives/shared_buffers.h"
#include "xla_ffi/collectives_launch.h"

// The program's stream (XLA's) waits for a transfer at once, or, where it is apart, in another call, the done: what the
// program has between the two runs beside the transfer. All buffers of the start are operands of the done, so that XLA
// does not use them for anything else until then; scratch memory it may, so that a transfer with that is waited for at
// once.
//
// Starts come in three stages: Prepare asks XLA for the group's communicator; Initialize gets to know the peers, and
// lets them use the buffers, which takes exchanges between all ranks the first time; Execute launches. They are not for
// command buffers: a graph may run branches side by side and in any order, while all ranks have to make their calls in
// one order.

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using namespace collectives;

// The groups of each device, by the ids of their mesh axis. Initialize, which every execution begins with, finds them;
// Execute takes them from here, since asking XLA for the communicator takes longer than a short transfer.
class KnownGroups {
public:
    Group find(const Attributes& attributes, const Exchange& exchange) {
        Peers& peers = peers_of(current_ordinal(), exchange, sizeof(Control));
        const std::lock_guard lock(mutex_);
        load_kernels();
        return groups_[key(attributes.groups, attributes.group_size)] = {exchange.communicator, &peers};
    }

    Group get(DeviceIds groups, int64_t group_size) {
        const std::lock_guard lock(mutex_);
        return groups_.at(key(groups, group_size));
    }

private:
    using Key = std::tuple<int, int64_t, std::vector<int64_t>>;

    // Once for each device.
    void load_kernels() {
        if (loaded_.contains(current_ordinal()))
            return;
        for (const auto preload : {preload_push, preload_pair_rows, preload_pull})
            check_cuda(preload(), "loading the kernels");
        loaded_.insert(current_ordinal());
    }

    static Key key(DeviceIds groups, int64_t group_size) {
        return {current_ordinal(), group_size, {groups.begin(), groups.end()}};
    }

    std::mutex mutex_;
    std::map<Key, Group> groups_;
    std::set<int> loaded_;
};

KnownGroups& known_groups() {
    static auto* const groups = new KnownGroups;  // never destroyed: handlers may outlive main
    return *groups;
}

// What XLA keeps until the program has been launched, as far as it ever will.
class Execution {
public:
    static ffi::TypeId id;  // by XLA

    Execution(TransferOrder& order, int64_t transfer, cudaStream_t program)
        : order_(order), program_(program), number_(order.prepare(transfer, program)) {}

    ~Execution() {
        try {
            order_.end(number_, program_);
        } catch (const std::exception&) {  // the error that the program has ended with tells more
        }
    }

    Execution(const Execution&) = delete;

private:
    TransferOrder& order_;
    const cudaStream_t program_;
    const int64_t number_;
};

ffi::TypeId Execution::id{};
ffi::TypeInfo execution_info = ffi::MakeTypeInfo<Execution>();

Places places_of(const std::vector<ffi::AnyBuffer>& buffers) {
    Places places;
    for (const ffi::AnyBuffer& buffer : buffers)
        places.push_back(buffer.untyped_data());
    return places;
}

std::unique_ptr<Execution> initialize(Kind kind, const CollectivesContext& context, const Buffers& buffers,
                                      const Attributes& attributes, cudaStream_t program) {
    const Exchange exchange{get_communicator(context, attributes.groups, attributes.group_size), program,
                            static_cast<uint64_t>(attributes.timeout_ms)};
    const Group group = known_groups().find(attributes, exchange);
    auto execution = std::make_unique<Execution>(group.peers->order, attributes.transfer, program);
    if (not group_shares_buffers(*group.peers, attributes))
        return execution;
    size_t bytes = 0;
    for (const ffi::AnyBuffer& buffer : shared_side(kind, buffers))
        bytes += buffer.size_bytes();
    share_buffers(*group.peers, exchange, bytes, places_of(buffers.to));  // results, for XLA makes all in its pool
    return execution;
}

void execute(Kind kind, const CollectivesContext&, const Buffers& buffers, const Attributes& attributes,
             cudaStream_t program, ffi::ScratchAllocator& allocator) {
    const Group group = known_groups().get(attributes.groups, attributes.group_size);
    TransferOrder& order = group.peers->order;
    const bool goes_first = attributes.is_apart and attributes.goes_first;
    Scratch scratch(allocator);
    const Transfer transfer = to_transfer(kind, buffers, attributes, *group.peers, scratch);
    const Launch launch{.transfer = transfer,
                        .buffers = buffers,
                        .group = group,
                        .stream = order.enter(program, attributes.is_apart),
                        .begun = goes_first ? order.begun() : nullptr};
    try {
        (kind == Kind::kCast ? launch_cast : launch_reduce)(launch);
        if (attributes.is_apart)
            order.record(attributes.transfer, places_of(buffers.to));
        else
            order.finish(launch.stream, program);
        if (goes_first)
            order.let_begin(program);
        if (attributes.is_apart and scratch.is_used())
            order.let_end(program, attributes.transfer);
    } catch (...) {
        try {
            order.finish(launch.stream, program);  // what has been launched nevertheless
        } catch (const std::exception&) {  // the first error tells more
        }
        throw;
    }
}

// The first operands are the results of the start, and the results the same. If XLA has moved them, the program waits
// nevertheless: others get the memory of both.
void wait_for_results(TransferOrder& order, cudaStream_t program, int64_t transfer,
                      const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results) {
    check(arguments.size() >= results.size(), "the end of a transfer needs its results as operands too");
    Places from, to;
    for (size_t i = 0; i < results.size(); ++i) {
        from.push_back(arguments.get<ffi::AnyBuffer>(i).value().untyped_data());
        to.push_back(results.get<ffi::AnyBuffer>(i).value()->untyped_data());
    }
    order.join(program, transfer, from);
    check(from == to, "the end of a transfer needs its results where the start has them, but XLA has moved them");
}

ffi::Error done(cudaStream_t program, ffi::RemainingArgs arguments, ffi::RemainingRets results, DeviceIds groups,
                int64_t group_size, int64_t transfer) {
    return guarded("jaxmagi_group_done", [&] {
        const Group group = known_groups().get(groups, group_size);
        wait_for_results(group.peers->order, program, transfer, arguments, results);
    });
}

constexpr const char* name_of(Kind kind) {
    return kind == Kind::kCast ? "jaxmagi_group_cast_start" : "jaxmagi_group_reduce_start";
}

template <Kind kKind, auto kRun, typename... More>
auto stage(cudaStream_t stream, CollectivesContext context, More... more, ffi::RemainingArgs arguments,
           ffi::RemainingRets results, DeviceIds groups, int64_t group_size, int64_t input_rows, int64_t output_rows,
           int64_t pair_rows, int64_t num_sms, int64_t implementation, int64_t ranks_per_host, int64_t timeout_ms,
           int64_t transfer, bool is_apart, bool goes_first) {
    return guarded(name_of(kKind), [&] {
        hopper_device();
        const Attributes attributes{groups,  group_size,     input_rows,     output_rows, pair_rows,
                                    num_sms, implementation, ranks_per_host, timeout_ms,  transfer,
                                    is_apart, goes_first};
        return kRun(kKind, context, to_buffers(arguments, results), attributes, stream, more...);
    });
}

template <Kind kKind>
ffi::Error prepare(CollectivesContext context, DeviceIds groups, int64_t group_size, int64_t, int64_t,
                   int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool) {
    return guarded(name_of(kKind), [&] { request_communicator(context, groups, group_size); });
}

auto with_attributes(auto binding) {
    return std::move(binding)
        .template Attr<DeviceIds>("groups")
        .template Attr<int64_t>("group_size")
        .template Attr<int64_t>("input_rows")
        .template Attr<int64_t>("output_rows")
        .template Attr<int64_t>("pair_rows")
        .template Attr<int64_t>("num_sms")
        .template Attr<int64_t>("implementation")
        .template Attr<int64_t>("ranks_per_host")
        .template Attr<int64_t>("timeout_ms")
        .template Attr<int64_t>("transfer")
        .template Attr<bool>("is_apart")
        .template Attr<bool>("goes_first");
}

template <ffi::ExecutionStage kStage> auto bind_context() {
    return ffi::Ffi::Bind<kStage>()
        .template Ctx<ffi::PlatformStream<cudaStream_t>>()
        .template Ctx<ffi::Extension<Collectives>>();
}

auto with_buffers(auto binding) {
    return with_attributes(std::move(binding).RemainingArgs().RemainingRets());
}

auto bind_prepare() {
    return with_attributes(ffi::Ffi::BindPrepare().Ctx<ffi::Extension<Collectives>>());
}

auto bind_initialize() {
    return with_buffers(bind_context<ffi::ExecutionStage::kInitialize>());
}

auto bind_execute() {
    return with_buffers(bind_context<ffi::ExecutionStage::kExecute>().Ctx<ffi::ScratchAllocator>());
}

XLA_FFI_DEFINE_HANDLER(kPrepareCast, prepare<Kind::kCast>, bind_prepare());
XLA_FFI_DEFINE_HANDLER(kInitializeCast, (stage<Kind::kCast, initialize>), bind_initialize());
XLA_FFI_DEFINE_HANDLER(kExecuteCast, (stage<Kind::kCast, execute, ffi::ScratchAllocator>), bind_execute());

XLA_FFI_DEFINE_HANDLER(kPrepareReduce, prepare<Kind::kReduce>, bind_prepare());
XLA_FFI_DEFINE_HANDLER(kInitializeReduce, (stage<Kind::kReduce, initialize>), bind_initialize());
XLA_FFI_DEFINE_HANDLER(kExecuteReduce, (stage<Kind::kReduce, execute, ffi::ScratchAllocator>), bind_execute());

XLA_FFI_DEFINE_HANDLER(kDone, done,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<DeviceIds>("groups")
                           .Attr<int64_t>("group_size")
                           .Attr<int64_t>("transfer"));

}  // namespace

CollectiveHandlers group_cast_cuda() {
    return {kPrepareCast, kInitializeCast, kExecuteCast};
}

CollectiveHandlers group_reduce_cuda() {
    return {kPrepareReduce, kInitializeReduce, kExecuteReduce};
}

XLA_FFI_Handler* group_done_cuda() {
    return kDone;
}

StateType group_execution_cuda() {
    return {&Execution::id, &execution_info};
}

int64_t pair_buffer_bytes(int64_t transfers, int64_t cp_size, int64_t pair_rows, std::span<const int64_t> row_bytes) {
    const int64_t bytes = std::accumulate(row_bytes.begin(), row_bytes.end(), int64_t{0});
    return 2 * cp_size * (static_cast<int64_t>(sizeof(PairHeader)) + transfers * pair_rows * bytes);
}

}  // namespace jaxmagi
