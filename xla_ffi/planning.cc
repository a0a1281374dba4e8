#include "xla_ffi/planning.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/mask/band.h"
#include "csrc/mask/tile_count.h"
#include "csrc/mask/tile_index.h"
#include "csrc/planning/balance.h"
#include "csrc/planning/merge.h"
#include "csrc/planning/pieces.h"
#include "csrc/planning/routing.h"
#include "csrc/planning/transfers.h"
#include "csrc/planning/units.h"

namespace jaxmagi {
namespace {

namespace nb = nanobind;
using planning::Routing;
using planning::RowCopy;
using planning::TransferTables;

template <int kColumns>
using Table = nb::ndarray<const int32_t, nb::shape<-1, kColumns>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
template <typename Int> using Array = nb::ndarray<nb::numpy, Int>;

std::span<const int32_t> to_span(const Ints& ints) {
    return {ints.data(), ints.size()};
}

std::vector<Band> to_bands(const Table<6>& table) {
    return tighten_bands(table.data(), static_cast<int64_t>(table.shape(0)), kUnbounded, kUnbounded);
}

// Returns a numpy array that owns the vector; a struct of integers of one type becomes the last axis.
template <typename Int, typename Value>
Array<Int> to_numpy(std::vector<Value> values, std::initializer_list<size_t> shape) {
    static_assert(sizeof(Value) % sizeof(Int) == 0);
    auto* owned = new std::vector<Value>(std::move(values));
    nb::capsule owner(owned, [](void* vector) noexcept { delete static_cast<std::vector<Value>*>(vector); });
    return Array<Int>(reinterpret_cast<Int*>(owned->data()), shape, owner);
}

Array<int32_t> to_numpy(std::vector<int32_t> values) {
    const size_t count = values.size();
    return to_numpy<int32_t>(std::move(values), {count});
}

Array<int32_t> to_table(std::vector<Band> bands) {
    const size_t count = bands.size();
    return to_numpy<int32_t>(std::move(bands), {count, 6});
}

// Returns the sends [n, 6] and the receives [m, 5].
std::pair<Array<int32_t>, Array<int32_t>> to_numpy(TransferTables tables) {
    const size_t sends = tables.sends.size(), receives = tables.receives.size();
    return {to_numpy<int32_t>(std::move(tables.sends), {sends, 6}),
            to_numpy<int32_t>(std::move(tables.receives), {receives, 5})};
}

// Computes without the GIL.
template <typename Compute> auto released(Compute compute) {
    nb::gil_scoped_release release;
    return compute();
}

Array<int32_t> merge_bands(Table<6> bands) {
    return to_table(released([&] { return planning::merge(to_bands(bands)); }));
}

Array<int32_t> balanced_owners(const std::vector<Table<6>>& tables, const std::vector<int64_t>& weights, int length,
                               int cp_size, std::pair<int, int> chunk_sizes, int64_t cells_per_row,
                               const std::vector<std::tuple<int, int, bool, double>>& kernels) {
    return to_numpy(released([&] {
        std::vector<planning::WeightedMask> masks;
        for (size_t i = 0; i < tables.size(); ++i)
            masks.push_back({to_bands(tables[i]), weights.at(i)});
        std::vector<planning::TiledPass> passes;
        for (const auto& [rows, keys, by_keys, partial_cost] : kernels)
            passes.push_back({rows, keys, by_keys, partial_cost});
        const planning::ChunkSizes chunks{.usual = chunk_sizes.first, .least = chunk_sizes.second};
        return planning::balanced_owners(masks, length, cp_size, chunks, cells_per_row, passes);
    }));
}

Array<int32_t> token_order(Ints owners, int length, int cp_size, int chunk_size) {
    return to_numpy(released([&] { return planning::token_order(to_span(owners), length, cp_size, chunk_size); }));
}

std::pair<Array<int32_t>, Array<int32_t>> place_copies(Table<5> copies) {
    const auto* first = reinterpret_cast<const RowCopy*>(copies.data());
    return to_numpy(released([&] { return planning::place_copies({first, first + copies.shape(0)}); }));
}

// Returns the full and the partial tiles [n, 2] of groups of bands; `groups` has the number of bands of each.
Array<int64_t> tile_counts(Table<6> bands, Ints groups, int rows, int keys, bool by_keys) {
    auto counts = released([&] {
        std::span rest(reinterpret_cast<const Band*>(bands.data()), bands.shape(0));
        std::vector<TileCount> counts;
        for (const int32_t count : to_span(groups)) {
            if (count < 0 or static_cast<size_t>(count) > rest.size())
                throw std::invalid_argument("groups must have 0 bands or more, all together at most " +
                                            std::to_string(bands.shape(0)) + ", but one has " + std::to_string(count));
            counts.push_back(count_tiles(rest.first(count), rows, keys, by_keys));
            rest = rest.subspan(count);
        }
        return counts;
    });
    const size_t count = counts.size();
    return to_numpy<int64_t>(std::move(counts), {count, 2});
}

// Returns rows [cp, 2, 2]: sent and received, within a host and between hosts.
Array<int64_t> traffic(const Routing& routing, int ranks_per_host) {
    auto rows = released([&] { return routing.traffic(ranks_per_host); });
    return to_numpy<int64_t>(std::move(rows), {static_cast<size_t>(routing.num_ranks()), 2, 2});
}

// Returns the bands of all ranks, and how many each has.
std::pair<Array<int32_t>, Array<int32_t>> bands_of_ranks(const Routing& routing) {
    std::vector<Band> all;
    std::vector<int32_t> counts;
    released([&] {
        for (int rank = 0; rank < routing.num_ranks(); ++rank) {
            const auto bands = routing.bands(rank);
            all.insert(all.end(), bands.begin(), bands.end());
            counts.push_back(static_cast<int32_t>(bands.size()));
        }
        return true;
    });
    return {to_table(std::move(all)), to_numpy<int32_t>(std::move(counts), {static_cast<size_t>(routing.num_ranks())})};
}

std::pair<Array<int32_t>, Array<int32_t>> transfer_tables(const Routing& routing) {
    return to_numpy(released([&] { return routing.transfer_tables(); }));
}

void bind_routing(nb::module_& m) {
    nb::class_<Routing>(m, "Routing", "The rows that each rank of a layout has, and the keys that it needs.")
        .def(
            "__init__",
            [](Routing* self, Table<6> bands, Ints tokens, int cp_size) {
                nb::gil_scoped_release release;
                new (self) Routing(to_bands(bands), to_span(tokens), cp_size);
            },
            nb::arg("bands"), nb::arg("token_order"), nb::arg("cp_size"))
        .def("traffic", traffic, nb::arg("ranks_per_host"))
        .def("most_received", &Routing::most_received)
        .def("bands", bands_of_ranks)
        .def("transfer_tables", transfer_tables);
}

}  // namespace

void bind_planning(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const planning::TooManyPieces& error) {
            PyErr_SetString(PyExc_NotImplementedError, error.what());
        }
    });
    m.def("tile_counts", tile_counts, nb::arg("bands"), nb::arg("groups"), nb::arg("rows"), nb::arg("keys"),
          nb::arg("by_keys"));
    m.def("merge_bands", merge_bands, nb::arg("bands"));
    m.def("balanced_owners", balanced_owners, nb::arg("masks"), nb::arg("weights"), nb::arg("length"),
          nb::arg("cp_size"), nb::arg("chunk_sizes"), nb::arg("cells_per_row"), nb::arg("kernels"),
          "Returns the rank of each chunk: int32 [n].");
    m.def("token_order", token_order, nb::arg("owners"), nb::arg("length"), nb::arg("cp_size"), nb::arg("chunk_size"));
    m.def("place_copies", place_copies, nb::arg("copies"));
    bind_routing(m);
}

}  // namespace jaxmagi
