#include "csrc/collectives/nccl.h"

#include <dlfcn.h>

#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace jaxmagi::nccl {
namespace {

// The values of ncclResult_t and ncclDataType_t.
using Result = int;
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kInt8 = 0;

// --- the library ---

// Returns the path of the loaded NCCL, or nothing. Some builds have another name than libnccl.so.2.
std::string loaded_path() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
        if (line.find("/libnccl.so") != std::string::npos)
            return line.substr(line.find('/'));
    return {};
}

void* loaded_library() {
    constexpr int kMode = RTLD_NOW | RTLD_NOLOAD;
    if (void* library = dlopen("libnccl.so.2", kMode))
        return library;
    const std::string path = loaded_path();
    if (void* library = path.empty() ? nullptr : dlopen(path.c_str(), kMode))
        return library;
    throw std::runtime_error(
        "NCCL is not loaded in this process: no libnccl.so.2, and no libnccl.so in /proc/self/maps (JAX for CUDA "
        "loads it from the package nvidia-nccl-cu12 or nvidia-nccl-cu13)");
}

// Returns a function of the loaded NCCL. If it throws while a static is initialized, the next call tries again.
template <typename Function> Function* find(const char* name) {
    static void* const library = loaded_library();
    void* const function = dlsym(library, name);
    if (function == nullptr)
        throw std::runtime_error(std::string("the loaded NCCL has no ") + name);
    return reinterpret_cast<Function*>(function);
}

// --- results ---

void check(Result result, const char* call, Communicator communicator) {
    if (result == kSuccess)
        return;
    static const auto error_string = find<const char*(Result)>("ncclGetErrorString");
    static const auto last_error = find<const char*(Communicator)>("ncclGetLastError");
    const char* const detail = last_error(communicator);
    throw std::runtime_error(std::string(call) + ": " + error_string(result) +
                             (detail and *detail ? std::string(" (") + detail + ")" : ""));
}

// On a non-blocking communicator, which XLA may use, operations return before they are enqueued.
void wait_and_check(Result result, const char* call, Communicator communicator) {
    static const auto get_async_error = find<Result(Communicator, Result*)>("ncclCommGetAsyncError");
    while (result == kInProgress) {
        std::this_thread::yield();
        check(get_async_error(communicator, &result), "ncclCommGetAsyncError", communicator);
    }
    check(result, call, communicator);
}

bool has_failed(Result result) {
    return result != kSuccess and result != kInProgress;
}

int query(const char* function, Communicator communicator) {
    int value = 0;
    check(find<Result(Communicator, int*)>(function)(communicator, &value), function, communicator);
    return value;
}

}  // namespace

int rank(Communicator communicator) {
    return query("ncclCommUserRank", communicator);
}

int size(Communicator communicator) {
    return query("ncclCommCount", communicator);
}

void all_gather(const void* from, void* to, size_t bytes_each, Communicator communicator, cudaStream_t stream) {
    static const auto gather =
        find<Result(const void*, void*, size_t, int, Communicator, cudaStream_t)>("ncclAllGather");
    wait_and_check(gather(from, to, bytes_each, kInt8, communicator, stream), "ncclAllGather", communicator);
}

void exchange(std::span<const Message> sends, std::span<const Message> receives, Communicator communicator,
              cudaStream_t stream) {
    static const auto group_start = find<Result()>("ncclGroupStart"), group_end = find<Result()>("ncclGroupEnd");
    static const auto send = find<Result(const void*, size_t, int, int, Communicator, cudaStream_t)>("ncclSend");
    static const auto recv = find<Result(void*, size_t, int, int, Communicator, cudaStream_t)>("ncclRecv");
    check(group_start(), "ncclGroupStart", communicator);
    Result sent = kSuccess, received = kSuccess;
    for (const Message& message : sends)
        if (not has_failed(sent))
            sent = send(message.data, message.bytes, kInt8, message.peer, communicator, stream);
    for (const Message& message : receives)
        if (not has_failed(sent) and not has_failed(received))
            received = recv(message.data, message.bytes, kInt8, message.peer, communicator, stream);
    const Result ended = group_end();  // also after a failure, or the thread would stay in the group
    if (has_failed(sent))
        check(sent, "ncclSend", communicator);
    if (has_failed(received))
        check(received, "ncclRecv", communicator);
    wait_and_check(ended, "ncclGroupEnd", communicator);
}

}  // namespace jaxmagi::nccl
