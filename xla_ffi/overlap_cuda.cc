#include "xla_ffi/overlap_cuda.h"

#include "csrc/collectives/address_exchange.h"
#include "csrc/collectives/peer_memory.h"
#include "csrc/common/hash.h"
#include "csrc/overlap/products.h"
#include "xla_ffi/collectives_groups.h"
#include "xla_ffi/collectives_params.h"

// The handlers of products with a collective over the ranks of a host. Their stages are those of collectives
// (collectives_cuda.cc). Execute launches kernels by which ranks tell each other where they receive tiles or rows,
// multiply and store tiles or rows there, and report if they have waited for too long.

namespace jaxmagi {
namespace {

using namespace collectives;
using namespace overlap;

template <Collective kCollective>
constexpr const char* kTarget = kCollective == Collective::kReduceScatter ? "jaxmagi_matmul_reduce_scatter"
                                                                          : "jaxmagi_all_gather_matmul";
template <Collective kCollective>
constexpr Kind kKind = kCollective == Collective::kReduceScatter ? Kind::kMatmulReduceScatter : Kind::kAllGatherMatmul;

struct OverlapAttributes {
    DeviceIds groups;
    int64_t group_size, timeout_ms;
    bool transposed_w;

    GroupIds group() const { return {groups, group_size}; }
};

// x · w = y as in products.h, and memory in which data of other ranks is received. Arrays of all ranks' rows are
// [examples, ranks, rows, width], those of a rank [examples, 1, rows, width].
struct OverlapBuffers {
    ffi::AnyBuffer x, w, y, received;
};

template <Collective kCollective>
ProductShape shape_of(const OverlapBuffers& buffers, const Peers& peers, bool transposed_w) {
    constexpr bool kScatters = kCollective == Collective::kReduceScatter;
    check_rank("x", buffers.x, 4);
    check_rank("y", buffers.y, 4);
    const auto x = buffers.x.dimensions();
    const int64_t inner = x[3], columns = buffers.y.dimensions()[3];
    check_shape("x", buffers.x, {x[0], kScatters ? peers.size : 1, x[2], inner});
    check_shape("w", buffers.w, transposed_w ? Shape{columns, inner} : Shape{inner, columns});
    check_shape("y", buffers.y, {x[0], kScatters ? 1 : peers.size, x[2], columns});
    check(inner % 8 == 0 and columns % 8 == 0, "the inner dimension and columns must be multiples of 8, got ", inner,
          " and ", columns);
    const ProductShape shape{.examples = to_int("the number of examples", x[0], 1),
                             .ranks = peers.size,
                             .rank = peers.rank,
                             .rows = to_int("the number of rows", x[2], 1),
                             .columns = to_int("the number of columns", columns, 1),
                             .inner = to_int("the inner dimension", inner, 1)};
    check_shape("received", buffers.received, {static_cast<int64_t>(received_layout(kCollective, shape).bytes)});
    return shape;
}

OperandType operand_type(const OverlapBuffers& buffers) {
    const ffi::DataType type = buffers.x.element_type();
    check_type("w", buffers.w, type);
    check_type("y", buffers.y, type);
    check(type == ffi::BF16 or type == ffi::F16, "operands must be bf16 or f16, got ", type);
    return type == ffi::BF16 ? OperandType::kBF16 : OperandType::kF16;
}

uint64_t hash_of(Kind kind, const ProductParams& params) {
    const ProductShape& shape = params.shape;
    Hash hash;
    hash.add(static_cast<uint64_t>(kind));
    hash.add(static_cast<uint64_t>(params.type));
    for (const int number : {shape.examples, shape.rows, shape.columns, shape.inner})
        hash.add(static_cast<uint64_t>(number));
    return hash.value();
}

template <Collective kCollective>
ProductParams to_params(const OverlapBuffers& buffers, const Peers& peers, const OverlapAttributes& attributes) {
    constexpr int kAlignment = 16;
    return {.shape = shape_of<kCollective>(buffers, peers, attributes.transposed_w),
            .type = operand_type(buffers),
            .x = data_of<const void>("x", buffers.x, kAlignment),
            .w = data_of<const void>("w", buffers.w, kAlignment),
            .transposed_w = attributes.transposed_w,
            .y = data_of<void>("y", buffers.y, kAlignment),
            .received = nullptr,  // known when it is published
            .counts = nullptr,    // and this with it
            .timeout_ns = static_cast<uint64_t>(to_int("timeout_ms", attributes.timeout_ms, 1)) * 1'000'000,
            .num_sms = hopper_device().num_sms};
}

template <Collective kCollective>
ffi::Error prepare(const CollectivesContext& context, const OverlapAttributes& attributes) {
    return guarded(kTarget<kCollective>,
                   [&] { request_communicator(context, attributes.groups, attributes.group_size); });
}

template <Collective kCollective>
ffi::Error initialize(cudaStream_t program, const CollectivesContext& context, ffi::AnyBuffer x, ffi::AnyBuffer w,
                      ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> received,
                      const OverlapAttributes& attributes) {
    return guarded_aloud(kTarget<kCollective>, [&] {
        hopper_device();
        const Bootstrap bootstrap{get_communicator(context, attributes.groups, attributes.group_size), program,
                                  static_cast<uint64_t>(attributes.timeout_ms)};
        Peers& peers = connect_group(attributes.group(), bootstrap);
        check(peers.is_one_host, "the ranks are not on one host: use implementation='xla'");
        check_cuda(preload(kCollective, operand_type({x, w, *y, *received}), attributes.transposed_w),
                   "loading the kernels");
        const void* const shared[] = {received->untyped_data()};
        if (not peers.is_one_process)
            map_peers(peers, bootstrap, received->size_bytes(), shared);
    });
}

template <Collective kCollective>
void launch(ProductParams params, const TransferParams& group, cudaStream_t program) {
    const ReceivedLayout layout = received_layout(kCollective, params.shape);
    // A staging buffer if peers do not reach XLA's.
    params.received = reinterpret_cast<char*>(group.resolve(group.published[0], group.slot));
    params.counts = &group.controls[group.slot]->product;
    auto* const failure = reinterpret_cast<uint32_t*>(params.received + layout.failure);
    check_cuda(exchange_addresses(group, {failure, layout.num_words()}, reinterpret_cast<uint64_t*>(params.received),
                                  program),
               "launching the kernel that exchanges addresses");
    const auto product = kCollective == Collective::kReduceScatter ? matmul_reduce_scatter : all_gather_matmul;
    check_cuda(product(params, program), "launching the kernel");
    check_cuda(finish_product(group, failure, program), "launching the kernel that ends the product");
}

template <Collective kCollective>
ffi::Error execute(cudaStream_t program, const DeviceMemory& memory, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> received,
                   const OverlapAttributes& attributes) {
    return guarded_aloud(kTarget<kCollective>, [&] {
        constexpr Kind kCallKind = kKind<kCollective>;
        Peers& peers = connected_group(attributes.group());
        const ProductParams params = to_params<kCollective>({x, w, *y, *received}, peers, attributes);
        ++peers.calls;
        TransferParams group = to_group_params({kCallKind, Implementation::kNative, 0, attributes.timeout_ms},
                                               hash_of(kCallKind, params), peers);
        group.num_arrays = 1;
        Scratch scratch(memory);
        publish_arrays(group, {*received}, peers, scratch);
        peers.order.begin(program);
        launch<kCollective>(params, group, program);
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

template <Collective kCollective> CollectiveHandlers handlers() {
    using Stream = ffi::PlatformStream<cudaStream_t>;
    using Extension = ffi::Extension<Collectives>;
    XLA_FFI_DEFINE_HANDLER(kPrepare, prepare<kCollective>,
                           ffi::Ffi::BindPrepare().Ctx<Extension>().Attrs<OverlapAttributes>());
    XLA_FFI_DEFINE_HANDLER(kInitialize, initialize<kCollective>,
                           with_buffers(ffi::Ffi::BindInitialize().Ctx<Stream>().Ctx<Extension>()));
    XLA_FFI_DEFINE_HANDLER(kExecute, execute<kCollective>,
                           with_buffers(ffi::Ffi::Bind().Ctx<Stream>().Ctx<DeviceMemory>()));
    return {kPrepare, kInitialize, kExecute};
}

}  // namespace

CollectiveHandlers matmul_reduce_scatter_cuda() {
    return handlers<Collective::kReduceScatter>();
}

CollectiveHandlers all_gather_matmul_cuda() {
    return handlers<Collective::kAllGather>();
}

}  // namespace jaxmagi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxmagi::OverlapAttributes, StructMember<jaxmagi::DeviceIds>("groups"),
                                      StructMember<int64_t>("group_size"), StructMember<int64_t>("timeout_ms"),
                                      StructMember<bool>("transposed_w"));
