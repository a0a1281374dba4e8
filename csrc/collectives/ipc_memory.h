#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

// Device memory that other devices access, in this process or by CUDA IPC in another process of the host: the control
// blocks of peers, and the staging buffers of rows where there is no pool to map (xla_pool.h). All functions are for
// the current device. A failure is a result and not an error, unless a comment says otherwise.

namespace jaxmagi::collectives {

// An allocation as its owner describes it to other ranks. Trivially copyable.
struct IpcMemory {
    char* pointer;  // in the owner's process; null if its device had too little memory
    cudaIpcMemHandle_t handle;
    bool has_handle;
};

// Returns memory that cudaFree frees, or null where there is too little.
char* allocate_ipc(size_t bytes);

IpcMemory describe_ipc(char* pointer);

// Maps memory of another process on the same host. Returns null where there is no access.
char* open_ipc(const IpcMemory& memory);

// Throws std::runtime_error.
void close_ipc(char* opened);

// Lets the current device, `ordinal`, access cudaMalloc's memory on another device of the process.
bool enable_peer_access(int ordinal, int other_ordinal);

// Returns whether two devices of this process are connected by NVLink.
bool have_nvlink(int ordinal, int other_ordinal);

// Returns whether that device can load from and store to a buffer of CUDA's virtual memory management. It is false for
// any other memory. Throws std::runtime_error where the driver cannot be asked.
bool can_access(int ordinal, const void* buffer);

}  // namespace jaxmagi::collectives
