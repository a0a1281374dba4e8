#include "csrc/collectives/xla_pool.h"

#include <cuda.h>
#include <fcntl.h>

#include <cstdint>
#include <stdexcept>

#include "csrc/collectives/driver_function.h"

namespace jaxmagi::collectives {
namespace {

constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
constexpr size_t kPageBytes = size_t{2} << 20;  // of the driver; XLA's allocator leaves less than that of its limit

struct Driver {
    decltype(cuMemGetAddressRange)* get_address_range;
    decltype(cuMemRetainAllocationHandle)* retain;
    decltype(cuMemRelease)* release;
    decltype(cuMemGetAllocationPropertiesFromHandle)* get_properties;
    decltype(cuMemExportToShareableHandle)* export_handle;
    decltype(cuMemImportFromShareableHandle)* import_handle;
    decltype(cuMemAddressReserve)* reserve;
    decltype(cuMemAddressFree)* free;
    decltype(cuMemMap)* map;
    decltype(cuMemUnmap)* unmap;
    decltype(cuMemSetAccess)* set_access;
};

template <typename Function> void find(Function*& function, const char* name) {
    function = driver_function<Function>(name);
}

Driver find_driver() {
    Driver driver{};
    try {
        find(driver.get_address_range, "cuMemGetAddressRange");
        find(driver.retain, "cuMemRetainAllocationHandle");
        find(driver.release, "cuMemRelease");
        find(driver.get_properties, "cuMemGetAllocationPropertiesFromHandle");
        find(driver.export_handle, "cuMemExportToShareableHandle");
        find(driver.import_handle, "cuMemImportFromShareableHandle");
        find(driver.reserve, "cuMemAddressReserve");
        find(driver.free, "cuMemAddressFree");
        find(driver.map, "cuMemMap");
        find(driver.unmap, "cuMemUnmap");
        find(driver.set_access, "cuMemSetAccess");
    } catch (const std::runtime_error&) {  // too old
        return {};
    }
    return driver;
}

const Driver& driver() {
    static const Driver found = find_driver();
    return found;
}

// Of physical memory, given back at the end of the scope; mappings keep the memory.
struct Handle {
    Handle() = default;
    ~Handle() {
        if (is_valid)
            driver().release(value);
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    CUmemGenericAllocationHandle value = 0;
    bool is_valid = false;
};

bool can_export(const Handle& handle) {
    CUmemAllocationProp properties{};
    return driver().get_properties(&properties, handle.value) == CUDA_SUCCESS and
           (properties.requestedHandleTypes & kDescriptor) != 0;
}

void retain(Handle& handle, const char* address) {
    handle.is_valid = driver().retain(&handle.value, const_cast<char*>(address)) == CUDA_SUCCESS;
}

bool give_access(CUdeviceptr address, size_t bytes) {
    const CUmemAccessDesc access{.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = current_ordinal()},
                                 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return driver().set_access(address, bytes, &access, 1) == CUDA_SUCCESS;
}

// Null if it does not succeed.
CUdeviceptr map_memory(const Handle& handle, size_t bytes) {
    CUdeviceptr address = 0;
    if (driver().reserve(&address, bytes, 0, 0, 0) != CUDA_SUCCESS)
        return 0;
    if (driver().map(address, bytes, 0, handle.value, 0) == CUDA_SUCCESS) {
        if (give_access(address, bytes))
            return address;
        driver().unmap(address, bytes);
    }
    driver().free(address, bytes);
    return 0;
}

}  // namespace

bool Pool::contains(const void* buffer, size_t buffer_bytes) const {
    const auto first = reinterpret_cast<uintptr_t>(begin), address = reinterpret_cast<uintptr_t>(buffer);
    return first <= address and address + buffer_bytes <= first + bytes;
}

std::optional<Pool> find_pool(const void* xla_buffer, size_t limit) {
    if (xla_buffer == nullptr or limit < kPageBytes or driver().set_access == nullptr)
        return std::nullopt;
    CUdeviceptr begin = 0;
    size_t bytes = 0;
    const auto buffer = reinterpret_cast<CUdeviceptr>(xla_buffer);
    if (driver().get_address_range(&begin, &bytes, buffer) != CUDA_SUCCESS or bytes / kPageBytes < limit / kPageBytes)
        return std::nullopt;
    const Pool pool{reinterpret_cast<char*>(begin), bytes};
    Handle handle;
    retain(handle, pool.begin);
    return handle.is_valid and can_export(handle) ? std::optional(pool) : std::nullopt;
}

FileDescriptor export_pool(const Pool& pool) {
    Handle handle;
    retain(handle, pool.begin);
    int descriptor = -1;
    const bool is_exported =
        handle.is_valid and driver().export_handle(&descriptor, handle.value, kDescriptor, 0) == CUDA_SUCCESS;
    if (not is_exported)
        return FileDescriptor();
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);  // or processes that are started meanwhile would keep the memory
    return FileDescriptor(descriptor);
}

MappedPool::MappedPool(const FileDescriptor& pool, size_t bytes) : bytes_(bytes) {
    Handle handle;
    void* const os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(pool.number()));
    handle.is_valid = driver().import_handle(&handle.value, os_handle, kDescriptor) == CUDA_SUCCESS;
    if (handle.is_valid)
        begin_ = reinterpret_cast<char*>(map_memory(handle, bytes));
}

MappedPool::~MappedPool() {
    if (begin_ == nullptr)
        return;
    driver().unmap(reinterpret_cast<CUdeviceptr>(begin_), bytes_);
    driver().free(reinterpret_cast<CUdeviceptr>(begin_), bytes_);
}

}  // namespace jaxmagi::collectives
