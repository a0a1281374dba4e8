#pragma once

#include <chrono>
#include <cstdint>
#include <map>

#include "csrc/collectives/file_descriptor.h"

namespace jaxmagi::collectives {

// The Unix socket of a process, and the token that messages to it must carry, since any process of the host may send to
// it. Trivially copyable, to be sent to other ranks.
struct SocketAddress {
    bool has_socket;
    uint64_t name;  // a random number
    uint64_t network_namespace;
    uint64_t token;
};

// Exchanges file descriptors, which stand for exported memory, with other processes of the host and the same network
// namespace, over a Unix socket (unix(7), SCM_RIGHTS).
class DescriptorExchange {
public:
    // If the system gives no socket, nothing is sent or received.
    DescriptorExchange();

    SocketAddress address() const;

    // Sends `descriptor` as `rank`'s to all the others, whose addresses are by rank, and returns theirs. All of them
    // must call it. A rank that cannot be reached or sends nothing within the time is left out.
    std::map<int, FileDescriptor> run(int rank, const FileDescriptor& descriptor,
                                      std::map<int, SocketAddress> others, std::chrono::milliseconds timeout) const;

private:
    FileDescriptor socket_;
    uint64_t network_namespace_, name_, token_;
};

}  // namespace jaxmagi::collectives
