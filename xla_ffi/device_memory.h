#pragma once

#include <optional>
#include <vector>

#include "xla/ffi/api/ffi.h"

// Device memory of XLA's allocator whose size is known only when a handler runs.

namespace jaxmagi {

struct MemoryBlock {
    void* data;
    size_t bytes;
};

// The allocator of a call. .Ctx<DeviceMemory>() binds it. XLA hands out memory in the order of the program's stream.
class DeviceMemory {
public:
    DeviceMemory(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context) : api_(api), context_(context) {}

    // Throws if there is too little.
    MemoryBlock allocate(size_t bytes) const;

    void free(const std::vector<MemoryBlock>& blocks) const;

private:
    const XLA_FFI_Api* api_;
    XLA_FFI_InvokeContext* context_;
};

}  // namespace jaxmagi

template <> struct xla::ffi::CtxDecoding<jaxmagi::DeviceMemory> {
    using Type = jaxmagi::DeviceMemory;

    static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context, DiagnosticEngine&) {
        return Type(api, context);
    }
};
