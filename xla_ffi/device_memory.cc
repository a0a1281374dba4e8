#include "xla_ffi/device_memory.h"

#include <stdexcept>
#include <string>

#include "xla_ffi/checks.h"

namespace jaxmagi {
namespace {

constexpr size_t kAlignment = 16;  // the least that arrays of rows need

// Throws a message of all parts if a function of XLA's has returned an error.
template <typename... Parts> void check_xla(const XLA_FFI_Api* api, XLA_FFI_Error* error, const Parts&... parts) {
    if (error == nullptr)
        return;
    const std::string reason = xla::ffi::internal::GetErrorMessage(api, error);
    xla::ffi::internal::DestroyError(api, error);
    throw std::runtime_error(message_of(parts..., ": ", reason));
}

}  // namespace

MemoryBlock DeviceMemory::allocate(size_t bytes) const {
    XLA_FFI_DeviceMemory_Allocate_Args arguments{};
    arguments.struct_size = XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE;
    arguments.ctx = context_;
    arguments.size = bytes;
    arguments.alignment = kAlignment;
    check_xla(api_, api_->XLA_FFI_DeviceMemory_Allocate(&arguments), "XLA has no ", bytes,
              " bytes left that a transfer needs beside its arrays");
    return {arguments.data, bytes};
}

void DeviceMemory::free(const std::vector<MemoryBlock>& blocks) const {
    for (const auto& [data, bytes] : blocks) {
        XLA_FFI_DeviceMemory_Free_Args arguments{};
        arguments.struct_size = XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE;
        arguments.ctx = context_;
        arguments.size = bytes;
        arguments.data = data;
        check_xla(api_, api_->XLA_FFI_DeviceMemory_Free(&arguments), "giving memory back to XLA");
    }
}

}  // namespace jaxmagi
