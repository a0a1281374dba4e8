#include "csrc/collectives/ipc_memory.h"

#include <cstdint>

#include "csrc/collectives/driver_function.h"
#include "csrc/common/check_cuda.h"
#include "csrc/common/math.h"

namespace jaxmagi::collectives {
namespace {

// Clears an error, or the next call would report it.
bool succeeds(cudaError_t error) {
    if (error != cudaSuccess)
        cudaGetLastError();
    return error == cudaSuccess;
}

}  // namespace

// Rounds up to the driver's pages, since other processes get access to whole pages.
char* allocate_ipc(size_t bytes) {
    constexpr int kPageBytes = 2 << 20;
    void* memory = nullptr;
    return succeeds(cudaMalloc(&memory, round_up(bytes, kPageBytes))) ? static_cast<char*>(memory) : nullptr;
}

IpcMemory describe_ipc(char* pointer) {
    IpcMemory memory{.pointer = pointer, .handle = {}, .has_handle = false};
    memory.has_handle = pointer != nullptr and succeeds(cudaIpcGetMemHandle(&memory.handle, pointer));
    return memory;
}

char* open_ipc(const IpcMemory& memory) {
    void* opened = nullptr;
    const bool is_open =
        memory.has_handle and succeeds(cudaIpcOpenMemHandle(&opened, memory.handle, cudaIpcMemLazyEnablePeerAccess));
    return is_open ? static_cast<char*>(opened) : nullptr;
}

void close_ipc(char* opened) {
    check_cuda(cudaIpcCloseMemHandle(opened), "closing another process' device memory");
}

bool enable_peer_access(int ordinal, int other_ordinal) {
    int can_access = 0;
    if (not succeeds(cudaDeviceCanAccessPeer(&can_access, ordinal, other_ordinal)) or not can_access)
        return false;
    const cudaError_t error = cudaDeviceEnablePeerAccess(other_ordinal, 0);
    return succeeds(error) or error == cudaErrorPeerAccessAlreadyEnabled;
}

bool have_nvlink(int ordinal, int other_ordinal) {
    int can_access = 0, has_atomics = 0;  // which PCIe has not
    return succeeds(cudaDeviceCanAccessPeer(&can_access, ordinal, other_ordinal)) and can_access and
           succeeds(cudaDeviceGetP2PAttribute(&has_atomics, cudaDevP2PAttrNativeAtomicSupported, ordinal,
                                              other_ordinal)) and
           has_atomics;
}

bool can_access(int ordinal, const void* buffer) {
    static auto* const get_access = JAXMAGI_DRIVER(cuMemGetAccess);
    const CUmemLocation device{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal};
    unsigned long long flags = 0;
    return get_access(&flags, &device, reinterpret_cast<CUdeviceptr>(buffer)) == CUDA_SUCCESS and
           flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

}  // namespace jaxmagi::collectives
