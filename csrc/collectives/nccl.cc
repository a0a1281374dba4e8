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

// A function of the loaded NCCL, of the type that it is assigned to.
struct Symbol {
    void* address;
    template <typename Function> operator Function*() const { return reinterpret_cast<Function*>(address); }
};

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

Library load() {
    const auto find = [handle = loaded_library()](const char* name) {
        void* const function = dlsym(handle, name);
        if (function == nullptr)
            throw std::runtime_error(std::string("the loaded NCCL has no ") + name);
        return Symbol{function};
    };
    return {find("ncclCommUserRank"), find("ncclCommCount"),      find("ncclCommGetAsyncError"),
            find("ncclAllGather"),    find("ncclSend"),           find("ncclRecv"),
            find("ncclGroupStart"),   find("ncclGroupEnd"),       find("ncclGetErrorString"),
            find("ncclGetLastError")};
}

// Returns all functions, which are found at the first call; if that throws, the next call tries again.
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

// On a non-blocking communicator, which XLA may use, operations return before they are enqueued.
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
    const Result ended = nccl.group_end();  // also after a failure, or the thread would stay in the group
    if (has_failed(sent))
        check(sent, "ncclSend", communicator);
    if (has_failed(received))
        check(received, "ncclRecv", communicator);
    wait_and_check(ended, "ncclGroupEnd", communicator);
}

}  // namespace jaxmagi::nccl
