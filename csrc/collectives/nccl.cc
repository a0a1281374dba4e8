#include "csrc/collectives/nccl.h"

#include <dlfcn.h>

#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace jaxmagi::nccl {
namespace {

// As in nccl.h.
using Result = int;
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kInt8 = 0;

// --- the library ---

// Empty where there is none. Needed for a copy whose name is not the usual one (of a vendor's build, say).
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

struct Library {
    Result (*comm_user_rank)(Communicator, int*);
    Result (*comm_count)(Communicator, int*);
    Result (*comm_get_async_error)(Communicator, Result*);
    Result (*all_gather)(const void*, void*, size_t, int, Communicator, cudaStream_t);
    Result (*send)(const void*, size_t, int, int, Communicator, cudaStream_t);
    Result (*recv)(void*, size_t, int, int, Communicator, cudaStream_t);
    Result (*group_start)();
    Result (*group_end)();
    const char* (*get_error_string)(Result);
    const char* (*get_last_error)(Communicator);
};

template <typename Function> void find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr)
        throw std::runtime_error(std::string("the loaded NCCL has no ") + name);
}

Library load() {
    void* const handle = loaded_library();
    Library library;
    find(handle, "ncclCommUserRank", library.comm_user_rank);
    find(handle, "ncclCommCount", library.comm_count);
    find(handle, "ncclCommGetAsyncError", library.comm_get_async_error);
    find(handle, "ncclAllGather", library.all_gather);
    find(handle, "ncclSend", library.send);
    find(handle, "ncclRecv", library.recv);
    find(handle, "ncclGroupStart", library.group_start);
    find(handle, "ncclGroupEnd", library.group_end);
    find(handle, "ncclGetErrorString", library.get_error_string);
    find(handle, "ncclGetLastError", library.get_last_error);
    return library;
}

// Where loading throws, the next call tries again.
const Library& library() {
    static const Library library = load();
    return library;
}

// --- results ---

void check(Result result, const char* call, Communicator communicator) {
    if (result == kSuccess)
        return;
    const char* const detail = library().get_last_error(communicator);
    throw std::runtime_error(std::string(call) + ": " + library().get_error_string(result) +
                             (detail and *detail ? std::string(" (") + detail + ")" : ""));
}

// Calls on a non-blocking communicator, which XLA may have, return before they are enqueued.
void wait_and_check(Result result, const char* call, Communicator communicator) {
    while (result == kInProgress) {
        std::this_thread::yield();
        check(library().comm_get_async_error(communicator, &result), "ncclCommGetAsyncError", communicator);
    }
    check(result, call, communicator);
}

bool has_failed(Result result) {
    return result != kSuccess and result != kInProgress;
}

}  // namespace

int rank(Communicator communicator) {
    int rank = 0;
    check(library().comm_user_rank(communicator, &rank), "ncclCommUserRank", communicator);
    return rank;
}

int size(Communicator communicator) {
    int size = 0;
    check(library().comm_count(communicator, &size), "ncclCommCount", communicator);
    return size;
}

void all_gather(const void* from, void* to, size_t bytes_each, Communicator communicator, cudaStream_t stream) {
    wait_and_check(library().all_gather(from, to, bytes_each, kInt8, communicator, stream), "ncclAllGather",
                   communicator);
}

void exchange(std::span<const Message> sends, std::span<const Message> receives, Communicator communicator,
              cudaStream_t stream) {
    const Library& nccl = library();
    check(nccl.group_start(), "ncclGroupStart", communicator);
    Result sent = kSuccess, received = kSuccess;
    for (const Message& message : sends)
        if (not has_failed(sent))
            sent = nccl.send(message.data, message.bytes, kInt8, message.peer, communicator, stream);
    for (const Message& message : receives)
        if (not has_failed(sent) and not has_failed(received))
            received = nccl.recv(message.data, message.bytes, kInt8, message.peer, communicator, stream);
    const Result ended = nccl.group_end();  // after a failure as well: the thread must leave the group
    if (has_failed(sent))
        check(sent, "ncclSend", communicator);
    if (has_failed(received))
        check(received, "ncclRecv", communicator);
    wait_and_check(ended, "ncclGroupEnd", communicator);
}

}  // namespace jaxmagi::nccl
