#pragma once

#include <string>

#include "xla_ffi/checks.h"

// Checks of operands and results that attention has on every platform. The parameters `operands` and `results` are
// structs of buffers by name.

namespace jaxmagi {

// Checks the shapes and types of q, k and v.
inline void check_operands(const auto& operands) {
    check_rank("q", operands.q, 4);
    check_rank("k", operands.k, 4);
    check_rank("v", operands.v, 4);
    check_type("k", operands.k, operands.q.element_type());
    check_type("v", operands.v, operands.q.element_type());
    const Shape q = shape_of(operands.q), k = shape_of(operands.k), v = shape_of(operands.v);
    const auto check_all = [&](bool holds, const char* what) { check(holds, what, ": q ", q, ", k ", k, ", v ", v); };
    check_all(q[0] == k[0] and q[3] == k[3], "q and k must agree in batch and head dim");
    check_all(k[0] == v[0] and k[1] == v[1] and k[2] == v[2], "k and v must agree in batch, length and heads");
    check_all(k[2] > 0 and q[2] % k[2] == 0, "the heads of q must be a multiple of those of k");
}

// Returns the shape of lse and delta, [batch, q_len, heads].
inline Shape row_shape(const ffi::AnyBuffer& q) {
    return {q.dimensions()[0], q.dimensions()[1], q.dimensions()[2]};
}

// Returns the shape of out and dout, [batch, q_len, heads, v_dim].
inline Shape out_shape(const ffi::AnyBuffer& q, const ffi::AnyBuffer& v) {
    return {q.dimensions()[0], q.dimensions()[1], q.dimensions()[2], v.dimensions()[3]};
}

// Results have the type of the operands, or the type in which the kernels accumulate.
inline void check_result(const char* name, const ffi::AnyBuffer& result, const Shape& shape, ffi::DataType operand,
                         ffi::DataType accumulation) {
    check_shape(name, result, shape);
    if (result.element_type() != accumulation)
        check_type(name, result, operand);
}

// Checks sinks, out and lse, given checked q, k and v.
inline void check_forward(const auto& operands, const auto& results, ffi::DataType accumulation) {
    const ffi::AnyBuffer &q = operands.q, &v = operands.v;
    check_buffer("sinks", operands.sinks, {q.dimensions()[2]}, accumulation);
    check_result("out", results.out, out_shape(q, v), q.element_type(), accumulation);
    check_buffer("lse", results.lse, row_shape(q), accumulation);
}

// Checks dout, lse, delta and the gradients, which have one type, given checked q, k and v.
inline void check_backward(const auto& operands, const auto& results, ffi::DataType accumulation) {
    const ffi::AnyBuffer &q = operands.q, &k = operands.k, &v = operands.v;
    check_buffer("dout", operands.dout, out_shape(q, v), q.element_type());
    check_buffer("lse", operands.lse, row_shape(q), accumulation);
    check_buffer("delta", operands.delta, row_shape(q), accumulation);
    check_result("dq", results.dq, shape_of(q), q.element_type(), accumulation);
    check_buffer("dk", results.dk, shape_of(k), results.dq.element_type());
    check_buffer("dv", results.dv, shape_of(v), results.dq.element_type());
}

}  // namespace jaxmagi
