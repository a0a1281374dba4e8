#include "xla_ffi/device_memory.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace jaxmagi {
namespace {

constexpr size_t kAlignment = 16;  // the least that arrays of rows need

// Returns the message of an error, and gives the error back.
std::string take_message(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
    const std::string message = xla::ffi::internal::GetErrorMessage(api, error);
    xla::ffi::internal::DestroyError(api, error);
    return message;
}

}  // namespace

MemoryBlock DeviceMemory::allocate(size_t bytes) const {
    XLA_FFI_DeviceMemory_Allocate_Args arguments{};
    arguments.struct_size = XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE;
    arguments.ctx = context_;
    arguments.size = bytes;
    arguments.alignment = kAlignment;
    if (XLA_FFI_Error* const error = api_->XLA_FFI_DeviceMemory_Allocate(&arguments))
        throw std::runtime_error("XLA has no " + std::to_string(bytes) +
                                 " bytes left that a group collective needs beside its arrays: " +
                                 take_message(api_, error));
    return {arguments.data, bytes};
}

void DeviceMemory::free(const std::vector<MemoryBlock>& blocks) const {
    for (const auto& [data, bytes] : blocks) {
        XLA_FFI_DeviceMemory_Free_Args arguments{};
        arguments.struct_size = XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE;
        arguments.ctx = context_;
        arguments.size = bytes;
        arguments.data = data;
        if (XLA_FFI_Error* const error = api_->XLA_FFI_DeviceMemory_Free(&arguments))
            throw std::runtime_error("giving memory back to XLA: " + take_message(api_, error));
    }
}

void HeldMemory::keep(const void* group, collectives::Addresses results, std::vector<MemoryBlock> blocks) {
    if (blocks.empty())
        return;
    const std::lock_guard lock(mutex_);
    entries_[group].push_back({std::move(results), std::move(blocks)});
}

std::vector<MemoryBlock> HeldMemory::take(const void* group, const collectives::Addresses& results) {
    const std::lock_guard lock(mutex_);
    auto& entries = entries_[group];
    const auto found = std::ranges::find(entries, results, &Entry::results);
    if (found == entries.end())
        return {};
    std::vector<MemoryBlock> blocks = std::move(found->blocks);
    entries.erase(found);
    return blocks;
}

std::vector<MemoryBlock> HeldMemory::take_all(const void* group) {
    const std::lock_guard lock(mutex_);
    std::vector<MemoryBlock> blocks;
    for (const Entry& entry : entries_[group])
        blocks.insert(blocks.end(), entry.blocks.begin(), entry.blocks.end());
    entries_[group].clear();
    return blocks;
}

void HeldMemory::clear() {
    const std::lock_guard lock(mutex_);
    entries_.clear();
}

}  // namespace jaxmagi
