#include "xla_ffi/planning.h"

#include <nanobind/ndarray.h>

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "csrc/mask/band.h"
#include "csrc/mask/tile_index.h"
#include "csrc/planning/balance.h"
#include "csrc/planning/pieces.h"

namespace jaxmagi {
namespace {

namespace nb = nanobind;

using BandArray = nb::ndarray<const int32_t, nb::shape<-1, 6>, nb::c_contig, nb::device::cpu>;
using IntArray = nb::ndarray<nb::numpy, int32_t>;

// A numpy array that owns the vector.
IntArray to_numpy(std::vector<int32_t> values) {
    auto* owned = new std::vector<int32_t>(std::move(values));
    nb::capsule owner(owned, [](void* vector) noexcept { delete static_cast<std::vector<int32_t>*>(vector); });
    return IntArray(owned->data(), {owned->size()}, owner);
}

IntArray balanced_owners(BandArray bands, int length, int cp_size, int chunk_size) {
    std::vector<int32_t> owners;
    {
        nb::gil_scoped_release release;
        const auto tight = tighten_bands(bands.data(), static_cast<int64_t>(bands.shape(0)), length, length);
        owners = planning::balanced_owners(tight, length, cp_size, chunk_size);
    }
    return to_numpy(std::move(owners));
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
    m.def("balanced_owners", balanced_owners, nb::arg("bands"), nb::arg("length"), nb::arg("cp_size"),
          nb::arg("chunk_size"), "The rank of each chunk: int32 [n].");
}

}  // namespace jaxmagi
