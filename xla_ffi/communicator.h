#pragma once

#include "csrc/collectives/nccl.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

// NCCL communicators that XLA lends to handlers, of a device's group along a mesh axis. They are not those of XLA's own
// collectives. Failures throw.

namespace jaxmagi {

struct CollectivesContext {
    const XLA_FFI_Api* api;
    const XLA_FFI_Collectives_Extension* extension;
};

// .Ctx<xla::ffi::Extension<Collectives>>() binds a CollectivesContext.
struct Collectives {
    using Type = CollectivesContext;
    using CExtension = XLA_FFI_Collectives_Extension;
    static constexpr auto kName = "CollectivesExtension";
    static constexpr int32_t kExtensionType = XLA_FFI_Extension_Collectives;
    static constexpr int32_t kMajorVersion = XLA_FFI_Extension_Collectives_MajorVersion;
    static constexpr int32_t kMinorVersion = XLA_FFI_Extension_Collectives_MinorVersion;

    // Minor versions only add fields. XLA's header compares the type of this function, so it must not be noexcept.
    static bool Support(int32_t major_version, int32_t) { return major_version == kMajorVersion; }

    static Type Create(const XLA_FFI_Api* api, const CExtension* extension) { return {api, extension}; }
};

using DeviceIds = xla::ffi::Span<const int64_t>;

// For Prepare: has XLA make the communicator of the device's group, unless it has one. `ids` lists all groups of a mesh
// axis, each as `group_size` places in the program's device assignment.
void request_communicator(const CollectivesContext& context, DeviceIds ids, int64_t group_size);

// For Initialize and Execute: returns a requested communicator, which XLA keeps.
nccl::Communicator get_communicator(const CollectivesContext& context, DeviceIds ids, int64_t group_size);

}  // namespace jaxmagi
