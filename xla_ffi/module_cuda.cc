#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "csrc/attention/sm90/forward.h"
#include "csrc/attention/sm90/plan.h"
#include "sources.h"
#include "xla_ffi/attention_cuda.h"

namespace nb = nanobind;

namespace {

nb::dict stages(jaxmagi::CudaHandlers handlers) {
    const auto capsule = [](XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
    nb::dict stages;
    stages["initialize"] = capsule(handlers.initialize);
    stages["execute"] = capsule(handlers.execute);
    return stages;
}

nb::dict registrations() {
    nb::dict targets;
    targets["jaxmagi_attention_plan"] = stages(jaxmagi::attention_plan_cuda());
    targets["jaxmagi_attention_forward"] = stages(jaxmagi::attention_forward_cuda());
    return targets;
}

std::optional<std::pair<int, int>> forward_tile(int dim, int v_dim) {
    const auto tile = jaxmagi::sm90::forward_tile(dim, v_dim);
    return tile ? std::optional(std::pair(tile->rows, tile->keys)) : std::nullopt;
}

}  // namespace

NB_MODULE(_cuda, m) {
    m.attr("sources") = kSourcesHash;
    m.def("registrations", registrations, "Per target the handlers of its stages, for platform \"CUDA\".");
    m.def("forward_tile", forward_tile, nb::arg("dim"), nb::arg("v_dim"),
          "Rows and keys of the forward kernel's tile, or None without a kernel for these head dimensions.");
    m.def("plan_workspace_words", jaxmagi::sm90::plan_workspace_words, nb::arg("plans"), nb::arg("capacity"),
          nb::arg("q_len"), nb::arg("tile_rows"), "Workspace of the plan in words of 8 bytes.");
}
