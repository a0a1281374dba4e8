#include "csrc/collectives/xla_pool.h"

#include <fcntl.h>

#include <cstdint>
#include <stdexcept>

#include "csrc/collectives/driver_function.h"

namespace jaxmagi::collectives {
namespace {

constexpr auto kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr size_t kPageBytes = size_t{2} << 20;  // of the driver; XLA's pool is less than a page smaller than its limit

// The driver's functions; all null if it lacks one of them, for then there is no pool to share.
struct Driver {
    decltype(&cuMemGetAddressRange) get_address_range;
    decltype(&cuMemRetainAllocationHandle) retain;
    decltype(&cuMemRelease) release;
    decltype(&cuMemGetAllocationPropertiesFromHandle) get_properties;
    decltype(&cuMemExportToShareableHandle) export_handle;
    decltype(&cuMemImportFromShareableHandle) import_handle;
    decltype(&cuMemAddressReserve) reserve;
    decltype(&cuMemAddressFree) free;
    decltype(&cuMemMap) map;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemSetAccess) set_access;
};

Driver find_driver() {
    try {
        return {JAXMAGI_DRIVER(cuMemGetAddressRange),
                JAXMAGI_DRIVER(cuMemRetainAllocationHandle),
                JAXMAGI_DRIVER(cuMemRelease),
                JAXMAGI_DRIVER(cuMemGetAllocationPropertiesFromHandle),
                JAXMAGI_DRIVER(cuMemExportToShareableHandle),
                JAXMAGI_DRIVER(cuMemImportFromShareableHandle),
                JAXMAGI_DRIVER(cuMemAddressReserve),
                JAXMAGI_DRIVER(cuMemAddressFree),
                JAXMAGI_DRIVER(cuMemMap),
                JAXMAGI_DRIVER(cuMemUnmap),
                JAXMAGI_DRIVER(cuMemSetAccess)};
    } catch (const std::runtime_error&) {  // the driver is too old
        return {};
    }
}

const Driver& driver() {
    static const Driver found = find_driver();
    return found;
}

// Holds a handle of physical memory. Mappings keep the memory beyond that.
class PhysicalMemory {
public:
    explicit PhysicalMemory(char* address)
        : is_valid_(driver().retain(&handle_, address) == CUDA_SUCCESS) {}
    explicit PhysicalMemory(const FileDescriptor& exported)
        : is_valid_(driver().import_handle(
                        &handle_, reinterpret_cast<void*>(static_cast<intptr_t>(exported.number())), kHandleType) ==
                    CUDA_SUCCESS) {}
    PhysicalMemory(const PhysicalMemory&) = delete;
    PhysicalMemory& operator=(const PhysicalMemory&) = delete;
    ~PhysicalMemory() {
        if (is_valid_)
            driver().release(handle_);
    }

    bool can_export() const {
        CUmemAllocationProp properties{};
        return is_valid_ and
               driver().get_properties(&properties, handle_) == CUDA_SUCCESS and
               (properties.requestedHandleTypes & kHandleType) != 0;
    }

    // Returns no descriptor if it fails.
    FileDescriptor export_descriptor() const {
        int descriptor = -1;
        if (not is_valid_ or
            driver().export_handle(&descriptor, handle_, kHandleType, 0) != CUDA_SUCCESS)
            return FileDescriptor();
        fcntl(descriptor, F_SETFD, FD_CLOEXEC);  // or processes started meanwhile would keep the memory
        return FileDescriptor(descriptor);
    }

    // Returns null if it fails.
    char* map(size_t bytes) const {
        CUdeviceptr address = 0;
        if (not is_valid_ or driver().reserve(&address, bytes, 0, 0, 0) != CUDA_SUCCESS)
            return nullptr;
        if (driver().map(address, bytes, 0, handle_, 0) == CUDA_SUCCESS) {
            const CUmemAccessDesc access{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = current_ordinal()},
                                         .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
            if (driver().set_access(address, bytes, &access, 1) == CUDA_SUCCESS)
                return reinterpret_cast<char*>(address);
            driver().unmap(address, bytes);
        }
        driver().free(address, bytes);
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
    if (xla_buffer == nullptr or limit < kPageBytes or driver().get_address_range == nullptr)
        return std::nullopt;
    CUdeviceptr begin = 0;
    size_t bytes = 0;
    const auto buffer = reinterpret_cast<CUdeviceptr>(xla_buffer);
    if (driver().get_address_range(&begin, &bytes, buffer) != CUDA_SUCCESS or
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
    driver().unmap(reinterpret_cast<CUdeviceptr>(begin_), bytes_);
    driver().free(reinterpret_cast<CUdeviceptr>(begin_), bytes_);
}

}  // namespace jaxmagi::collectives
