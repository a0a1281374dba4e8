#pragma once

#include <chrono>
#include <cstdint>
#include <map>

#include "csrc/collectives/file_descriptor.h"

namespace jaxmagi::collectives {

// Where other processes of the host send descriptors to. Trivially copyable, to be sent to them in another way.
struct MailAddress {
    bool has_socket;
    uint64_t name;     // a random number
    uint64_t network;  // the network namespace, which has to be the same
    uint64_t token;    // what letters have to show
};

// Gives file descriptors to other processes of the host, and takes theirs: unix(7), SCM_RIGHTS.
class DescriptorMail {
public:
    // Without a socket if the system gives none: then nothing comes and goes.
    DescriptorMail();

    MailAddress address() const;

    // Sends `descriptor` as `rank`'s to all the others, whose addresses are by rank, and returns theirs. All have to
    // call it; who cannot be reached, or has not sent anything within the time, is left out.
    std::map<int, FileDescriptor> swap(int rank, const FileDescriptor& descriptor,
                                       std::map<int, MailAddress> others, std::chrono::milliseconds timeout) const;

private:
    FileDescriptor socket_;
    uint64_t network_, name_, token_;
};

}  // namespace jaxmagi::collectives
