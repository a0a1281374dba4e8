#include "xla_ffi/attention_cpu.h"

#include <utility>

#include "csrc/attention/cpu/backward.h"
#include "csrc/attention/cpu/forward.h"
#include "csrc/mask/band.h"
#include "xla_ffi/checks.h"

namespace jaxmagi {
namespace {

namespace ffi = xla::ffi;
using Result = ffi::Result<ffi::AnyBuffer>;

ffi::DataType accumulation_type(ffi::DataType operand) {
    return operand == ffi::F64 ? ffi::F64 : ffi::F32;
}

cpu::DType dtype_of(const char* name, const ffi::AnyBuffer& buffer) {
    switch (buffer.element_type()) {
        case ffi::F64: return cpu::DType::kF64;
        case ffi::F32: return cpu::DType::kF32;
        case ffi::BF16: return cpu::DType::kBF16;
        case ffi::F16: return cpu::DType::kF16;
        default:
            throw std::invalid_argument(std::string(name) + " must be f64, f32, bf16 or f16, got " +
                                        type_name(buffer.element_type()));
    }
}

template <typename Tensor> Tensor to_tensor(const char* name, const ffi::AnyBuffer& buffer) {
    check_rank(name, buffer, 4);
    const auto dims = buffer.dimensions();
    check(dims[1] <= kUnbounded, std::string(name) + " is longer than 2^30: " + to_string(shape_of(buffer)));
    return {buffer.untyped_data(), dtype_of(name, buffer), dims[1], dims[2], dims[3]};
}

// A result may come in the operands' type or in the accumulation type.
void check_result(const char* name, const ffi::AnyBuffer& result, const Shape& shape, ffi::DataType operand) {
    check_shape(name, result, shape);
    if (result.element_type() != accumulation_type(operand))
        check_type(name, result, operand);
}

void check_operands(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v) {
    check_rank("q", q, 4);
    check_rank("k", k, 4);
    check_rank("v", v, 4);
    check_type("k", k, q.element_type());
    check_type("v", v, q.element_type());
    const Shape query = shape_of(q), key = shape_of(k), value = shape_of(v);
    const std::string shapes = "q " + to_string(query) + ", k " + to_string(key) + ", v " + to_string(value);
    check(query[0] == key[0] and query[3] == key[3], "q and k must agree in batch and head dim: " + shapes);
    check(key[0] == value[0] and key[1] == value[1] and key[2] == value[2],
          "k and v must agree in batch, length and heads: " + shapes);
    check(key[2] > 0 and query[2] % key[2] == 0, "the heads of q must be a multiple of those of k: " + shapes);
}

cpu::BandTable to_band_table(const ffi::AnyBuffer& bands, int64_t batch) {
    check_type("bands", bands, ffi::S32);
    check_rank("bands", bands, 3);
    const auto dims = bands.dimensions();
    check(dims[2] == 6 and (dims[0] == 1 or dims[0] == batch),
          "bands must have shape [1 or " + std::to_string(batch) + ", count, 6], got " + to_string(shape_of(bands)));
    return {bands.typed_data<int32_t>(), dims[0], dims[1]};
}

Scheduler to_scheduler(ffi::ThreadPool& pool) {
    return {.num_threads = static_cast<int>(pool.num_threads()),
            .schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer bands,
                   ffi::AnyBuffer sinks, Result out, Result lse, double scale, double soft_cap) {
    return guarded("jaxmagi_attention_forward", [&] {
        check_operands(q, k, v);
        check_soft_cap(soft_cap);
        const Shape query = shape_of(q);
        const ffi::DataType accumulation = accumulation_type(q.element_type());
        check_shape("sinks", sinks, {query[2]});
        check_type("sinks", sinks, accumulation);
        check_result("out", *out, {query[0], query[1], query[2], v.dimensions()[3]}, q.element_type());
        check_shape("lse", *lse, {query[0], query[1], query[2]});
        check_type("lse", *lse, accumulation);
        const cpu::ForwardParams params{.batch = query[0],
                                        .q = to_tensor<cpu::Operand>("q", q),
                                        .k = to_tensor<cpu::Operand>("k", k),
                                        .v = to_tensor<cpu::Operand>("v", v),
                                        .out = to_tensor<cpu::Result>("out", *out),
                                        .bands = to_band_table(bands, query[0]),
                                        .sinks = sinks.untyped_data(),
                                        .lse = lse->untyped_data(),
                                        .scale = scale,
                                        .soft_cap = soft_cap};
        cpu::attention_forward(params, to_scheduler(pool));
    });
}

ffi::Error backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer bands,
                    ffi::AnyBuffer dout, ffi::AnyBuffer lse, ffi::AnyBuffer delta, Result dq, Result dk, Result dv,
                    double scale, double soft_cap) {
    return guarded("jaxmagi_attention_backward", [&] {
        check_operands(q, k, v);
        check_soft_cap(soft_cap);
        const Shape query = shape_of(q), rows{query[0], query[1], query[2]};
        const ffi::DataType operand = q.element_type();
        check_shape("dout", dout, {query[0], query[1], query[2], v.dimensions()[3]});
        check_type("dout", dout, operand);
        check_shape("lse", lse, rows);
        check_type("lse", lse, accumulation_type(operand));
        check_shape("delta", delta, rows);
        check_type("delta", delta, accumulation_type(operand));
        check_result("dq", *dq, query, operand);
        check_result("dk", *dk, shape_of(k), operand);
        check_result("dv", *dv, shape_of(v), operand);
        const cpu::BackwardParams params{.batch = query[0],
                                         .q = to_tensor<cpu::Operand>("q", q),
                                         .k = to_tensor<cpu::Operand>("k", k),
                                         .v = to_tensor<cpu::Operand>("v", v),
                                         .dout = to_tensor<cpu::Operand>("dout", dout),
                                         .dq = to_tensor<cpu::Result>("dq", *dq),
                                         .dk = to_tensor<cpu::Result>("dk", *dk),
                                         .dv = to_tensor<cpu::Result>("dv", *dv),
                                         .bands = to_band_table(bands, query[0]),
                                         .lse = lse.untyped_data(),
                                         .delta = delta.untyped_data(),
                                         .scale = scale,
                                         .soft_cap = soft_cap};
        cpu::attention_backward(params, to_scheduler(pool));
    });
}

XLA_FFI_DEFINE_HANDLER(kForward, forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // q
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<ffi::AnyBuffer>()  // v
                           .Arg<ffi::AnyBuffer>()  // bands
                           .Arg<ffi::AnyBuffer>()  // sinks
                           .Ret<ffi::AnyBuffer>()  // out
                           .Ret<ffi::AnyBuffer>()  // lse
                           .Attr<double>("scale")
                           .Attr<double>("soft_cap"));

XLA_FFI_DEFINE_HANDLER(kBackward, backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // q
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<ffi::AnyBuffer>()  // v
                           .Arg<ffi::AnyBuffer>()  // bands
                           .Arg<ffi::AnyBuffer>()  // dout
                           .Arg<ffi::AnyBuffer>()  // lse
                           .Arg<ffi::AnyBuffer>()  // delta
                           .Ret<ffi::AnyBuffer>()  // dq
                           .Ret<ffi::AnyBuffer>()  // dk
                           .Ret<ffi::AnyBuffer>()  // dv
                           .Attr<double>("scale")
                           .Attr<double>("soft_cap"));

}  // namespace

XLA_FFI_Handler* attention_forward_cpu() {
    return kForward;
}

XLA_FFI_Handler* attention_backward_cpu() {
    return kBackward;
}

}  // namespace jaxmagi
