#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "csrc/attention/cpu/dispatch.h"
#include "xla_ffi/attention_cpu.h"
#include "xla_ffi/planning.h"

namespace nb = nanobind;

namespace {

nb::dict registrations() {
    const auto capsule = [](XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
    nb::dict handlers;
    handlers["jaxmagi_attention_forward"] = capsule(jaxmagi::attention_forward_cpu());
    handlers["jaxmagi_attention_backward"] = capsule(jaxmagi::attention_backward_cpu());
    return handlers;
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.def("registrations", registrations, "Returns the FFI handlers by target, for platform \"cpu\".");
    m.def("instruction_sets", jaxmagi::cpu::instruction_sets,
          "Returns the instruction sets that kernels can use on this machine, fastest first.");
    m.def("use_instruction_set", jaxmagi::cpu::use_instruction_set, nb::arg("name"),
          "Switches to the kernels of an instruction set, for tests.");
    jaxmagi::bind_planning(m);
}
