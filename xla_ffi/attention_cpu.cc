#include "xla_ffi/attention_cpu.h"

#include <utility>

#include "csrc/attention/cpu/backward.h"
#include "csrc/attention/cpu/forward.h"
#include "csrc/mask/band.h"
#include "xla_ffi/attention_checks.h"

namespace jaxmagi {
namespace {

struct Attributes { double scale, soft_cap; };
struct ForwardOperands { ffi::AnyBuffer q, k, v, bands, sinks; };
struct ForwardResults { ffi::AnyBuffer out, lse; };
struct BackwardOperands { ffi::AnyBuffer q, k, v, bands, dout, lse, delta; };
struct BackwardResults { ffi::AnyBuffer dq, dk, dv; };

ffi::DataType accumulation_type(const ffi::AnyBuffer& operand) {
    return operand.element_type() == ffi::F64 ? ffi::F64 : ffi::F32;
}

cpu::DType dtype_of(const char* name, const ffi::AnyBuffer& buffer) {
    switch (buffer.element_type()) {
        case ffi::F64: return cpu::DType::kF64;
        case ffi::F32: return cpu::DType::kF32;
        case ffi::BF16: return cpu::DType::kBF16;
        case ffi::F16: return cpu::DType::kF16;
        default:
            fail(name, " must be f64, f32, bf16 or f16, got ", buffer.element_type());
    }
}

template <typename Tensor> Tensor to_tensor(const char* name, const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    check(dims[1] <= kUnbounded, name, " is longer than 2^30: ", shape_of(buffer));
    return {buffer.untyped_data(), dtype_of(name, buffer), dims[1], dims[2], dims[3]};
}

cpu::BandTable to_band_table(const ffi::AnyBuffer& bands, int64_t batch) {
    check_type("bands", bands, ffi::S32);
    check_rank("bands", bands, 3);
    const auto dims = bands.dimensions();
    check(dims[2] == 6 and (dims[0] == 1 or dims[0] == batch),
          "bands must have shape [1 or ", batch, ", count, 6], got ", shape_of(bands));
    return {bands.typed_data<int32_t>(), dims[0], dims[1]};
}

Scheduler to_scheduler(ffi::ThreadPool& pool) {
    return {.num_threads = static_cast<int>(pool.num_threads()),
            .schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

// Checks and sets the parameters that both passes have.
void set_operands(auto& params, const auto& operands, const Attributes& attributes) {
    check_operands(operands);
    check_soft_cap(attributes.soft_cap);
    params.batch = operands.q.dimensions()[0];
    params.q = to_tensor<cpu::Operand>("q", operands.q);
    params.k = to_tensor<cpu::Operand>("k", operands.k);
    params.v = to_tensor<cpu::Operand>("v", operands.v);
    params.bands = to_band_table(operands.bands, params.batch);
    params.scale = attributes.scale;
    params.soft_cap = attributes.soft_cap;
}

ffi::Error forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes attributes) {
    return guarded("jaxmagi_attention_forward", [&] {
        const auto operands = decode_buffers<ForwardOperands>(args);
        const auto results = decode_buffers<ForwardResults>(rets);
        cpu::ForwardParams params{};
        set_operands(params, operands, attributes);
        check_forward(operands, results, accumulation_type(operands.q));
        params.sinks = operands.sinks.untyped_data();
        params.out = to_tensor<cpu::Result>("out", results.out);
        params.lse = results.lse.untyped_data();
        cpu::attention_forward(params, to_scheduler(pool));
    });
}

ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes attributes) {
    return guarded("jaxmagi_attention_backward", [&] {
        const auto operands = decode_buffers<BackwardOperands>(args);
        const auto results = decode_buffers<BackwardResults>(rets);
        cpu::BackwardParams params{};
        set_operands(params, operands, attributes);
        check_backward(operands, results, accumulation_type(operands.q));
        params.dout = to_tensor<cpu::Operand>("dout", operands.dout);
        params.lse = operands.lse.untyped_data();
        params.delta = operands.delta.untyped_data();
        params.dq = to_tensor<cpu::Result>("dq", results.dq);
        params.dk = to_tensor<cpu::Result>("dk", results.dk);
        params.dv = to_tensor<cpu::Result>("dv", results.dv);
        cpu::attention_backward(params, to_scheduler(pool));
    });
}

}  // namespace
}  // namespace jaxmagi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxmagi::Attributes, StructMember<double>("scale"),
                                      StructMember<double>("soft_cap"));

namespace jaxmagi {
namespace {

auto bind_handler() {
    return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs<Attributes>();
}

}  // namespace

XLA_FFI_Handler* attention_forward_cpu() {
    XLA_FFI_DEFINE_HANDLER(kHandler, forward, bind_handler());
    return kHandler;
}

XLA_FFI_Handler* attention_backward_cpu() {
    XLA_FFI_DEFINE_HANDLER(kHandler, backward, bind_handler());
    return kHandler;
}

}  // namespace jaxmagi
