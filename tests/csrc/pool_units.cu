// Tests a memory pool that one process makes as XLA does and another one maps, on one GPU and without XLA.

#include <cuda.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>

#include "csrc/collectives/descriptor_exchange.h"
#include "csrc/collectives/driver_function.h"
#include "csrc/collectives/xla_pool.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

constexpr size_t kBytes = size_t{64} << 20;
constexpr int kOwner = 0, kOther = 1;

void must_do(CUresult result, const char* what) {
    if (result == CUDA_SUCCESS)
        return;
    std::printf("%s: %d\n", what, static_cast<int>(result));
    std::exit(1);
}

char* make_pool(CUmemAllocationHandleType exported_as) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    properties.requestedHandleTypes = exported_as;
    CUmemGenericAllocationHandle handle;
    must_do(JAXMAGI_DRIVER(cuMemCreate)(&handle, kBytes, &properties, 0), "cuMemCreate");
    CUdeviceptr address;
    must_do(JAXMAGI_DRIVER(cuMemAddressReserve)(&address, kBytes, 0, 0, 0), "cuMemAddressReserve");
    must_do(JAXMAGI_DRIVER(cuMemMap)(address, kBytes, 0, handle, 0), "cuMemMap");
    const CUmemAccessDesc access{.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    must_do(JAXMAGI_DRIVER(cuMemSetAccess)(address, kBytes, &access, 1), "cuMemSetAccess");
    return reinterpret_cast<char*>(address);
}

bool holds(const char* memory, int value) {
    std::vector<char> bytes(kBytes);
    must(cudaMemcpy(bytes.data(), memory, kBytes, cudaMemcpyDeviceToHost), "copying from the pool");
    return bytes == std::vector<char>(kBytes, static_cast<char>(value));
}

void fill(char* memory, int value) {
    must(cudaMemset(memory, value, kBytes), "filling the pool");
    must(cudaDeviceSynchronize(), "filling the pool");
}

FileDescriptor swap(const DescriptorExchange& exchange, int rank, const FileDescriptor& own,
                    const SocketAddress& other) {
    auto received = exchange.run(rank, own, {{1 - rank, other}}, std::chrono::seconds(30));
    return received.empty() ? FileDescriptor() : std::move(received.begin()->second);
}

// Maps the pool, whose bytes are 1, and sets them to 2. The descriptor that it sends is not of a pool.
int use_pool(const DescriptorExchange& exchange, const SocketAddress& owner) {
    must(cudaSetDevice(0), "choosing a device");
    must(cudaFree(nullptr), "making a context");
    const MappedPool mapped(swap(exchange, kOther, FileDescriptor(open("/dev/null", O_RDONLY)), owner), kBytes);
    if (mapped.begin() == nullptr or not holds(mapped.begin(), 1))
        return 1;
    fill(mapped.begin(), 2);
    return 0;
}

void share_pool(Verdict& verdict, const DescriptorExchange& exchange, const SocketAddress& other, pid_t process) {
    must(cudaSetDevice(0), "choosing a device");
    must(cudaFree(nullptr), "making a context");
    char* const begin = make_pool(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    fill(begin, 1);
    const auto pool = find_pool(begin + kBytes / 2, kBytes - 100);
    verdict.expect("the pool around a buffer", pool and pool->begin == begin and pool->bytes == kBytes);
    const FileDescriptor no_pool = swap(exchange, kOwner, export_pool(Pool{begin, kBytes}), other);
    verdict.expect("no pool", no_pool and MappedPool(no_pool, kBytes).begin() == nullptr);
    int status = 0;
    const bool has_ended = waitpid(process, &status, 0) == process;
    verdict.expect("another process uses it", has_ended and status == 0);
    verdict.expect("it has written there", holds(begin, 2));

    verdict.expect("inside", pool and pool->contains(begin, kBytes) and pool->contains(begin + 100, kBytes - 100));
    verdict.expect("outside", pool and not pool->contains(begin + 1, kBytes) and not pool->contains(begin - 1, 1));
    verdict.expect("less than the limit", not find_pool(begin, 2 * kBytes));
    verdict.expect("no limit", not find_pool(begin, 0));
    verdict.expect("no buffer", not find_pool(nullptr, kBytes));
    verdict.expect("not to be exported", not find_pool(make_pool(CU_MEM_HANDLE_TYPE_NONE), kBytes));
    char* other_memory;
    must(cudaMalloc(&other_memory, kBytes), "cudaMalloc");
    verdict.expect("memory of another kind", not find_pool(other_memory, kBytes));
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    const DescriptorExchange owner, other;
    const pid_t process = fork();  // CUDA comes after it
    if (process == 0)
        _exit(use_pool(other, owner.address()));
    Verdict verdict;
    share_pool(verdict, owner, other.address(), process);
    return verdict.exit_code();
}
