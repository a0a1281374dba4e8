#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/attention/sm90/tile_schedule.h"
#include "csrc/collectives/ipc_memory.h"
#include "csrc/collectives/peer_memory.h"
#include "csrc/collectives/peers.h"
#include "csrc/overlap/products.h"
#include "sources.h"
#include "xla_ffi/attention_cuda.h"
#include "xla_ffi/collectives_cuda.h"
#include "xla_ffi/context_cuda.h"
#include "xla_ffi/overlap_cuda.h"

namespace nb = nanobind;

namespace {

nb::capsule capsule(auto* pointer) {
    return nb::capsule(reinterpret_cast<void*>(pointer));
}

// Returns the handlers by stage.
nb::dict stages(auto handlers) {
    nb::dict stages;
    if constexpr (requires { handlers.prepare; })
        stages["prepare"] = capsule(handlers.prepare);
    stages["initialize"] = capsule(handlers.initialize);
    stages["execute"] = capsule(handlers.execute);
    return stages;
}

nb::dict registrations() {
    nb::dict targets;
    targets["jaxmagi_attention_tile_schedule"] = stages(jaxmagi::attention_tile_schedule_cuda());
    targets["jaxmagi_attention_forward"] = stages(jaxmagi::attention_forward_cuda());
    targets["jaxmagi_attention_backward"] = stages(jaxmagi::attention_backward_cuda());
    targets["jaxmagi_group_cast"] = stages(jaxmagi::group_cast_cuda());
    targets["jaxmagi_group_reduce"] = stages(jaxmagi::group_reduce_cuda());
    targets["jaxmagi_context_forward"] = stages(jaxmagi::context_forward_cuda());
    targets["jaxmagi_context_backward"] = stages(jaxmagi::context_backward_cuda());
    targets["jaxmagi_all_gather_matmul"] = stages(jaxmagi::all_gather_matmul_cuda());
    targets["jaxmagi_matmul_reduce_scatter"] = stages(jaxmagi::matmul_reduce_scatter_cuda());
    return targets;
}

using Tile = std::optional<std::pair<int, int>>;

template <auto kTile> Tile tile(int dim, int v_dim) {
    const auto found = kTile(dim, v_dim);
    return found ? Tile(std::pair(found->rows, found->keys)) : std::nullopt;
}

int64_t backward_workspace_bytes(int batch, int q_len, int kv_len, int heads, int kv_heads, int dim, int v_dim,
                                 int key_tiles, int num_masks, bool deterministic) {
    const jaxmagi::sm90::BackwardShape shape{.batch = batch,
                                             .q_len = q_len,
                                             .kv_len = kv_len,
                                             .heads = heads,
                                             .kv_heads = kv_heads,
                                             .dim = dim,
                                             .v_dim = v_dim,
                                             .key_tiles = key_tiles};
    if (not jaxmagi::sm90::backward_tile(dim, v_dim))
        throw nb::value_error(("no kernel for the head dimensions " + std::to_string(dim) + " and " +
                               std::to_string(v_dim)).c_str());
    return jaxmagi::sm90::backward_workspace_bytes(shape, num_masks, deterministic);
}

template <jaxmagi::overlap::Collective kCollective>
int64_t received_bytes(int examples, int ranks, int rows, int columns, int inner) {
    return static_cast<int64_t>(
        jaxmagi::overlap::received_layout(kCollective, {examples, ranks, 0, rows, columns, inner}).bytes);
}

nb::dict statistics() {
    jaxmagi::collectives::Statistics sums;
    {
        const nb::gil_scoped_release release;
        sums = jaxmagi::collectives::statistics();
    }
    nb::dict numbers;
    numbers["transfers"] = sums.transfers;
    numbers["native_bytes"] = sums.native_bytes;
    numbers["nccl_bytes"] = sums.nccl_bytes;
    numbers["nccl_messages"] = sums.nccl_messages;
    numbers["control_bytes"] = sums.control_bytes;
    return numbers;
}

}  // namespace

NB_MODULE(_cuda, m) {
    m.attr("sources") = kSourcesHash;
    m.def("registrations", registrations, "Returns the handlers by target and stage, for platform \"CUDA\".");
    m.def("forward_tile", tile<jaxmagi::sm90::forward_tile>, nb::arg("dim"), nb::arg("v_dim"),
          "Returns the rows and keys of the forward kernel's tile, or None if no kernel has these head dimensions.");
    m.def("backward_tile", tile<jaxmagi::sm90::backward_tile>, nb::arg("dim"), nb::arg("v_dim"),
          "Returns the rows and keys of the backward kernel's tile, or None if no kernel has these head dimensions.");
    m.def("backward_workspace_bytes", backward_workspace_bytes, nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"),
          nb::arg("heads"), nb::arg("kv_heads"), nb::arg("dim"), nb::arg("v_dim"), nb::arg("key_tiles"),
          nb::arg("num_masks"), nb::arg("deterministic"),
          "Returns the bytes of the backward pass's workspace, a multiple of 16.");
    m.def("tile_schedule_workspace_words", jaxmagi::sm90::tile_schedule_workspace_words, nb::arg("num_masks"),
          nb::arg("capacity"), nb::arg("num_tiles"),
          "Returns the workspace of the tile schedule in words of 8 bytes.");
    const auto define_received_bytes = [&](const char* name, auto bytes) {
        m.def(name, bytes, nb::arg("examples"), nb::arg("ranks"), nb::arg("rows"), nb::arg("columns"), nb::arg("inner"),
              "Returns the bytes of the memory in which a rank receives what others have for its product.");
    };
    using jaxmagi::overlap::Collective;
    define_received_bytes("matmul_reduce_scatter_bytes", received_bytes<Collective::kReduceScatter>);
    define_received_bytes("all_gather_matmul_bytes", received_bytes<Collective::kAllGather>);
    m.def("collective_statistics", statistics,
          "Returns what the group collectives of this process have moved, by the names of Statistics in Python.");
    m.def("finalize_collectives", jaxmagi::collectives::finalize, nb::call_guard<nb::gil_scoped_release>(),
          "Frees the memory that the group collectives keep on the devices.");
    m.def("have_nvlink", jaxmagi::collectives::have_nvlink, nb::arg("ordinal"), nb::arg("other_ordinal"),
          "Returns whether two devices that this process sees are connected by NVLink.");
    m.def("set_memory_limit", jaxmagi::collectives::set_memory_limit, nb::arg("ordinal"), nb::arg("bytes"),
          "Sets how much memory of a device XLA's allocator may take in this process; 0 if that is unknown.");
    m.def("staging_bytes", jaxmagi::collectives::staging_bytes,
          "Returns the bytes of this process's staging buffers, through which rows of other processes are copied.");
}
