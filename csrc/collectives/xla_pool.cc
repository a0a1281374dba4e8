#include "csrc/collectives/xla_pool.h"

#include <fcntl.h>

#include <cstdint>

#include "csrc/collectives/driver_function.h"

namespace jaxmagi::collectives {
namespace {

constexpr auto kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr size_t kPageBytes = size_t{2} << 20;  // of the driver; XLA's pool is less than a page smaller than its limit

// Holds a handle of physical memory. Mappings keep the memory beyond that.
class PhysicalMemory {
public:
    explicit PhysicalMemory(char* address)
        : is_valid_(JAXMAGI_DRIVER(cuMemRetainAllocationHandle)(&handle_, address) == CUDA_SUCCESS) {}
    explicit PhysicalMemory(const FileDescriptor& exported)
        : is_valid_(JAXMAGI_DRIVER(cuMemImportFromShareableHandle)(
                        &handle_, reinterpret_cast<void*>(static_cast<intptr_t>(exported.number())), kHandleType) ==
                    CUDA_SUCCESS) {}
    PhysicalMemory(const PhysicalMemory&) = delete;
    PhysicalMemory& operator=(const PhysicalMemory&) = delete;
    ~PhysicalMemory() {
        if (is_valid_)
            JAXMAGI_DRIVER(cuMemRelease)(handle_);
    }

    bool can_export() const {
        CUmemAllocationProp properties{};
        return is_valid_ and
               JAXMAGI_DRIVER(cuMemGetAllocationPropertiesFromHandle)(&properties, handle_) == CUDA_SUCCESS and
               (properties.requestedHandleTypes & kHandleType) != 0;
    }

    // Returns no descriptor if it fails.
    FileDescriptor export_descriptor() const {
        int descriptor = -1;
        if (not is_valid_ or
            JAXMAGI_DRIVER(cuMemExportToShareableHandle)(&descriptor, handle_, kHandleType, 0) != CUDA_SUCCESS)
            return FileDescriptor();
        fcntl(descriptor, F_SETFD, FD_CLOEXEC);  // or processes started meanwhile would keep the memory
        return FileDescriptor(descriptor);
    }

    // Returns null if it fails.
    char* map(size_t bytes) const {
        CUdeviceptr address = 0;
        if (not is_valid_ or JAXMAGI_DRIVER(cuMemAddressReserve)(&address, bytes, 0, 0, 0) != CUDA_SUCCESS)
            return nullptr;
        if (JAXMAGI_DRIVER(cuMemMap)(address, bytes, 0, handle_, 0) == CUDA_SUCCESS) {
            const CUmemAccessDesc access{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = current_ordinal()},
                                         .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
            if (JAXMAGI_DRIVER(cuMemSetAccess)(address, bytes, &access, 1) == CUDA_SUCCESS)
                return reinterpret_cast<char*>(address);
            JAXMAGI_DRIVER(cuMemUnmap)(address, bytes);
        }
        JAXMAGI_DRIVER(cuMemAddressFree)(address, bytes);
        return nullptr;
    }

private:
    CUmemGenericAllocationHandle handle_ = 0;
    bool is_valid_;
};

}  // namespace

bool Pool::contains(const void* buffer, size_t buffer_bytes) const {
    const auto first = reinterpret_cast<uintptr_t>(begin), address = reinterpret_cast<uintptr_t>(buffer);
    return first <= address and address + buffer_bytes <= first + bytes;
}

std::optional<Pool> find_pool(const void* xla_buffer, size_t limit) {
    if (xla_buffer == nullptr or limit < kPageBytes)
        return std::nullopt;
    CUdeviceptr begin = 0;
    size_t bytes = 0;
    const auto buffer = reinterpret_cast<CUdeviceptr>(xla_buffer);
    if (JAXMAGI_DRIVER(cuMemGetAddressRange)(&begin, &bytes, buffer) != CUDA_SUCCESS or
        bytes / kPageBytes < limit / kPageBytes)
        return std::nullopt;
    const Pool pool{reinterpret_cast<char*>(begin), bytes};
    return PhysicalMemory(pool.begin).can_export() ? std::optional(pool) : std::nullopt;
}

FileDescriptor export_pool(const Pool& pool) {
    return PhysicalMemory(pool.begin).export_descriptor();
}

MappedPool::MappedPool(const FileDescriptor& exported, size_t bytes)
    : begin_(PhysicalMemory(exported).map(bytes)), bytes_(bytes) {}

MappedPool::~MappedPool() {
    if (begin_ == nullptr)
        return;
    JAXMAGI_DRIVER(cuMemUnmap)(reinterpret_cast<CUdeviceptr>(begin_), bytes_);
    JAXMAGI_DRIVER(cuMemAddressFree)(reinterpret_cast<CUdeviceptr>(begin_), bytes_);
}

}  // namespace jaxmagi::collectives
