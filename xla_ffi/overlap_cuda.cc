#include "xla_ffi/overlap_cuda.h"

#include "csrc/collectives/address_exchange.h"
#include "csrc/collectives/peer_memory.h"
#include "csrc/common/hash.h"
#include "csrc/overlap/reduce_scatter.h"
#include "xla_ffi/collectives_groups.h"
#include "xla_ffi/collectives_params.h"

// The handler of a product whose parts are summed over the ranks of a host. Its stages are those of collectives
// (collectives_cuda.cc). Execute launches three kernels: ranks tell each other where they receive tiles, multiply and
// store tiles there, and report if they have waited for too long.

namespace jaxmagi {
namespace {

using namespace collectives;
using namespace overlap;

constexpr const char* kTarget = "jaxmagi_matmul_reduce_scatter";

struct OverlapAttributes {
    DeviceIds groups;
    int64_t group_size, timeout_ms;
    bool transposed_w;

    GroupIds group() const { return {groups, group_size}; }
};

// x [examples, ranks, rows, inner] · w [inner, columns], or transposed, gives y [examples, rows, columns].
struct OverlapOperands {
    ffi::AnyBuffer x, w;
};
struct OverlapResults {
    ffi::AnyBuffer y, received;  // memory in which tiles come from other ranks
};

GroupCall to_call(const OverlapAttributes& attributes) {
    return {Kind::kMatmulReduceScatter, Implementation::kNative, 0, attributes.timeout_ms};
}

ReduceScatterShape shape_of(const OverlapOperands& operands, const OverlapResults& results, const Peers& peers,
                            bool transposed_w) {
    check_rank("x", operands.x, 4);
    check_rank("w", operands.w, 2);
    check_rank("y", results.y, 3);
    const auto x = operands.x.dimensions();
    const int64_t inner = x[3], columns = results.y.dimensions()[2];
    check(x[1] == peers.size, "x must have rows for ", peers.size, " ranks, got ", x[1]);
    check_shape("w", operands.w, transposed_w ? Shape{columns, inner} : Shape{inner, columns});
    check_shape("y", results.y, {x[0], x[2], columns});
    check(inner % 8 == 0 and columns % 8 == 0, "the inner dimension and columns must be multiples of 8, got ", inner,
          " and ", columns);
    const ReduceScatterShape shape{.examples = to_int("the number of examples", x[0], 1),
                                   .ranks = peers.size,
                                   .rank = peers.rank,
                                   .rows = to_int("the number of rows", x[2], 1),
                                   .columns = to_int("the number of columns", columns, 1),
                                   .inner = to_int("the inner dimension", inner, 1)};
    check_shape("received", results.received, {static_cast<int64_t>(received_layout(shape).bytes)});
    return shape;
}

OperandType operand_type(const OverlapOperands& operands, const OverlapResults& results) {
    const ffi::DataType type = operands.x.element_type();
    check_type("w", operands.w, type);
    check_type("y", results.y, type);
    check(type == ffi::BF16 or type == ffi::F16, "operands must be bf16 or f16, got ", type);
    return type == ffi::BF16 ? OperandType::kBF16 : OperandType::kF16;
}

uint64_t hash_of(const ReduceScatterParams& params) {
    const ReduceScatterShape& shape = params.shape;
    Hash hash;
    for (const int64_t number : {static_cast<int64_t>(Kind::kMatmulReduceScatter), int64_t{shape.examples},
                                 int64_t{shape.rows}, int64_t{shape.columns}, int64_t{params.type == OperandType::kBF16}})
        hash.add(static_cast<uint64_t>(number));
    return hash.value();
}

ReduceScatterParams to_params(const OverlapOperands& operands, const OverlapResults& results, const Peers& peers,
                              const OverlapAttributes& attributes) {
    constexpr int kAlignment = 16;
    return {.shape = shape_of(operands, results, peers, attributes.transposed_w),
            .type = operand_type(operands, results),
            .x = data_of<const void>("x", operands.x, kAlignment),
            .w = data_of<const void>("w", operands.w, kAlignment),
            .transposed_w = attributes.transposed_w,
            .y = data_of<void>("y", results.y, kAlignment),
            .received = data_of<char>("received", results.received, kAlignment),
            .timeout_ns = static_cast<uint64_t>(to_int("timeout_ms", attributes.timeout_ms, 1)) * 1'000'000,
            .num_sms = hopper_device().num_sms};
}

ffi::Error prepare(const CollectivesContext& context, const OverlapAttributes& attributes) {
    return guarded(kTarget, [&] { request_communicator(context, attributes.groups, attributes.group_size); });
}

ffi::Error initialize(cudaStream_t program, const CollectivesContext& context, ffi::AnyBuffer x, ffi::AnyBuffer w,
                      ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> received,
                      const OverlapAttributes& attributes) {
    return guarded_aloud(kTarget, [&] {
        hopper_device();
        const Bootstrap bootstrap{get_communicator(context, attributes.groups, attributes.group_size), program,
                                  static_cast<uint64_t>(attributes.timeout_ms)};
        Peers& peers = connect_group(attributes.group(), bootstrap);
        check(peers.is_one_host, "the ranks are not on one host: use implementation='xla'");
        check_cuda(preload_reduce_scatter(operand_type({x, w}, {*y, *received}), attributes.transposed_w),
                   "loading the kernels");
        const void* const shared[] = {received->untyped_data()};
        if (not peers.is_one_process)
            map_peers(peers, bootstrap, received->size_bytes(), shared);
    });
}

void launch(ReduceScatterParams params, TransferParams group, cudaStream_t program) {
    const ReceivedLayout layout = received_layout(params.shape);
    // The memory that peers write to: a staging buffer if they do not reach XLA's.
    params.received = reinterpret_cast<char*>(group.resolve(group.published[0], group.slot));
    auto* const failure = reinterpret_cast<uint32_t*>(params.received + layout.failure);
    const int64_t words = static_cast<int64_t>(layout.tiles - layout.failure) / static_cast<int64_t>(sizeof(uint32_t));
    check_cuda(exchange_addresses(group, {failure, words}, reinterpret_cast<uint64_t*>(params.received), program),
               "launching the kernel that exchanges addresses");
    check_cuda(matmul_reduce_scatter(params, program), "launching the kernel");
    check_cuda(report_failure(group, failure, program), "launching the kernel that reports failures");
}

ffi::Error execute(cudaStream_t program, const DeviceMemory& memory, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> received,
                   const OverlapAttributes& attributes) {
    return guarded_aloud(kTarget, [&] {
        Peers& peers = connected_group(attributes.group());
        const ReduceScatterParams params = to_params({x, w}, {*y, *received}, peers, attributes);
        ++peers.calls;
        TransferParams group = to_group_params(to_call(attributes), hash_of(params), peers);
        group.num_arrays = 1;
        Scratch scratch(memory);
        publish_arrays(group, {*received}, peers, scratch);
        peers.order.begin(program);
        launch(params, group, program);
        peers.order.end(program);
    });
}

auto with_buffers(auto binding) {
    return std::move(binding)
        .template Arg<ffi::AnyBuffer>()
        .template Arg<ffi::AnyBuffer>()
        .template Ret<ffi::AnyBuffer>()
        .template Ret<ffi::AnyBuffer>()
        .template Attrs<OverlapAttributes>();
}

}  // namespace

CollectiveHandlers matmul_reduce_scatter_cuda() {
    using Stream = ffi::PlatformStream<cudaStream_t>;
    using Extension = ffi::Extension<Collectives>;
    XLA_FFI_DEFINE_HANDLER(kPrepare, prepare, ffi::Ffi::BindPrepare().Ctx<Extension>().Attrs<OverlapAttributes>());
    XLA_FFI_DEFINE_HANDLER(kInitialize, initialize,
                           with_buffers(ffi::Ffi::BindInitialize().Ctx<Stream>().Ctx<Extension>()));
    XLA_FFI_DEFINE_HANDLER(kExecute, execute, with_buffers(ffi::Ffi::Bind().Ctx<Stream>().Ctx<DeviceMemory>()));
    return {kPrepare, kInitialize, kExecute};
}

}  // namespace jaxmagi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxmagi::OverlapAttributes, StructMember<jaxmagi::DeviceIds>("groups"),
                                      StructMember<int64_t>("group_size"), StructMember<int64_t>("timeout_ms"),
                                      StructMember<bool>("transposed_w"));
