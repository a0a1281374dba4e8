#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/collectives/transfer_order.h"
#include "xla/ffi/api/ffi.h"

// Device memory of XLA's allocator whose size is known only when a handler runs. XLA's own ScratchAllocator frees at
// the end of the call, which is too early for a transfer that goes on.

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

// The memory of asynchronous transfers until they have ended, by their groups and results.
class HeldMemory {
public:
    void keep(const void* group, collectives::Addresses results, std::vector<MemoryBlock> blocks);

    // Returns the memory of the transfer with these results, which is not kept any more.
    std::vector<MemoryBlock> take(const void* group, const collectives::Addresses& results);

    // Returns all memory of a group: no transfer of it is in flight, but a program may have failed before the end of
    // one.
    std::vector<MemoryBlock> take_all(const void* group);

    // Forgets all memory, when no program will run with the groups any more. XLA frees it with its backend.
    void clear();

private:
    struct Entry {
        collectives::Addresses results;
        std::vector<MemoryBlock> blocks;
    };

    std::mutex mutex_;
    std::map<const void*, std::vector<Entry>> entries_;
};

}  // namespace jaxmagi

template <> struct xla::ffi::CtxDecoding<jaxmagi::DeviceMemory> {
    using Type = jaxmagi::DeviceMemory;

    static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context, DiagnosticEngine&) {
        return Type(api, context);
    }
};
