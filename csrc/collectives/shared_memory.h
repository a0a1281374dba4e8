#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

// Device memory that other devices use, of this process or of another one on the host. Always with the current device;
// what fails is a no, not an error, unless it says otherwise.

namespace jaxmagi::collectives {

// An allocation as its owner describes it to others. Trivially copyable.
struct SharedMemory {
    char* pointer;  // for the owner's process; null if there was too little memory
    cudaIpcMemHandle_t handle;
    bool has_handle;
};

// Null where there is too little memory. To be freed with cudaFree.
char* allocate_shared(size_t bytes);

SharedMemory describe(char* pointer);

// The memory of another process on the same host, in the address space of this one; null where there is no access.
char* open_shared(const SharedMemory& memory);

// Throws std::runtime_error.
void close_shared(char* opened);

// Lets the current device, of this ordinal, use the memory that cudaMalloc gives on another device of the process.
bool enable_access(int ordinal, int other_ordinal);

// Whether that device can load from and store to a buffer of CUDA's virtual memory management; false for any other
// memory. Throws std::runtime_error where the driver cannot be asked.
bool can_access(int ordinal, const void* buffer);

}  // namespace jaxmagi::collectives
