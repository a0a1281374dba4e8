#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "csrc/common/check_cuda.h"
#include "xla_ffi/checks.h"

// Handlers on CUDA query the runtime and the device with these functions, which throw on failure.

namespace jaxmagi {

struct CudaDevice {
    std::string name;
    int major, minor, num_sms;
};

inline CudaDevice query_device(int ordinal) {
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, ordinal), "properties of device " + std::to_string(ordinal));
    return {properties.name, properties.major, properties.minor, properties.multiProcessorCount};
}

// Returns the device that XLA made current for the handler. The driver is slow to answer, so it is asked only once.
inline const CudaDevice& current_device() {
    static std::mutex mutex;
    static auto* const devices = new std::map<int, CudaDevice>;  // never destroyed: handlers may outlive main
    const int ordinal = current_ordinal();
    const std::lock_guard lock(mutex);
    const auto known = devices->find(ordinal);
    return known != devices->end() ? known->second : devices->emplace(ordinal, query_device(ordinal)).first->second;
}

inline const CudaDevice& hopper_device() {
    const CudaDevice& device = current_device();
    check(device.major == 9 and device.minor == 0,
          "the kernels need a GPU of compute capability 9.0 (H100, H200), but this is an ", device.name,
          " of compute capability ", device.major, ".", device.minor);
    return device;
}

// Returns the data of a buffer, after a check of the alignment that the kernels rely on.
template <typename Element>
Element* data_of(const char* name, const xla::ffi::AnyBuffer& buffer, size_t alignment = alignof(Element)) {
    check(reinterpret_cast<uintptr_t>(buffer.untyped_data()) % alignment == 0, name, " must be aligned to ", alignment,
          " bytes");
    return static_cast<Element*>(buffer.untyped_data());
}

}  // namespace jaxmagi
