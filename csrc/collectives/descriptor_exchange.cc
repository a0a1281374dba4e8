#include "csrc/collectives/descriptor_exchange.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "csrc/collectives/process_identity.h"

namespace jaxmagi::collectives {
namespace {

struct Payload {
    uint64_t token;  // of the receiver
    int64_t sender;
};

// Returns an address in the abstract namespace, which has no file: the name begins with a zero byte.
std::pair<sockaddr_un, socklen_t> to_sockaddr(const SocketAddress& to) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    constexpr int kDigits = 32;
    const int digits = std::snprintf(address.sun_path + 1, kDigits, "jaxmagi-%016" PRIx64, to.name);
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + digits)};
}

// A message with a payload and room for one descriptor; the system closes any further ones that are received.
struct Message {
    explicit Message(Payload& payload) : content{&payload, sizeof payload} {
        header.msg_iov = &content;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = CMSG_LEN(sizeof(int));
    }
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;

    iovec content;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
};

// Returns false if it must be tried again, because the receiver's queue is full or the system has too many descriptors
// in flight. Any other failure is final and counts as sent.
bool send(int socket, Payload payload, int descriptor, const SocketAddress& to) {
    auto [address, length] = to_sockaddr(to);
    Message message(payload);
    message.header.msg_name = &address;
    message.header.msg_namelen = length;
    cmsghdr* const rights = CMSG_FIRSTHDR(&message.header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
    return sendmsg(socket, &message.header, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof payload or
           not(errno == EAGAIN or errno == ENOBUFS or errno == ETOOMANYREFS or errno == EINTR);
}

// Returns the sender and its descriptor, if there is a message with a descriptor and the token.
std::optional<std::pair<int, FileDescriptor>> receive(int socket, uint64_t token) {
    Payload payload{};
    Message message(payload);
    const ssize_t bytes = recvmsg(socket, &message.header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const cmsghdr* const rights = bytes < 0 ? nullptr : CMSG_FIRSTHDR(&message.header);
    if (rights == nullptr or rights->cmsg_level != SOL_SOCKET or rights->cmsg_type != SCM_RIGHTS or
        rights->cmsg_len != CMSG_LEN(sizeof(int)))
        return std::nullopt;
    int number;
    std::memcpy(&number, CMSG_DATA(rights), sizeof number);
    FileDescriptor descriptor(number);
    if (bytes != sizeof payload or payload.token != token)
        return std::nullopt;
    return std::pair(static_cast<int>(payload.sender), std::move(descriptor));
}

// Returns the inode of the process' network namespace, or 0 if the system does not tell it.
uint64_t network_namespace() {
    struct stat status{};
    return stat("/proc/self/ns/net", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

DescriptorExchange::DescriptorExchange()
    : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)),
      network_namespace_(network_namespace()),
      name_(random_token()),
      token_(random_token()) {
    const auto [own, length] = to_sockaddr(address());
    if (socket_ and bind(socket_.number(), reinterpret_cast<const sockaddr*>(&own), length) != 0)
        socket_ = FileDescriptor();
}

SocketAddress DescriptorExchange::address() const {
    return {.has_socket = static_cast<bool>(socket_),
            .name = name_,
            .network_namespace = network_namespace_,
            .token = token_};
}

// While a receiver's queue is full, this process empties its own, so that no two ranks wait for each other.
std::map<int, FileDescriptor> DescriptorExchange::run(int rank, const FileDescriptor& descriptor,
                                                      std::map<int, SocketAddress> others,
                                                      std::chrono::milliseconds timeout) const {
    constexpr int kPollMs = 5;
    std::erase_if(others, [&](const auto& other) { return other.second.network_namespace != network_namespace_; });
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::map<int, SocketAddress> to_send = others;
    std::map<int, FileDescriptor> received;
    while (socket_ and not(to_send.empty() and received.size() == others.size()) and
           std::chrono::steady_clock::now() < deadline) {
        std::erase_if(to_send, [&](const auto& other) {
            const auto& [peer, address] = other;
            return send(socket_.number(), {address.token, rank}, descriptor.number(), address);
        });
        pollfd waiting{.fd = socket_.number(), .events = POLLIN, .revents = 0};
        if (poll(&waiting, 1, kPollMs) <= 0)
            continue;
        auto message = receive(socket_.number(), token_);
        if (message and others.contains(message->first))
            received.insert(std::move(*message));
    }
    return received;
}

}  // namespace jaxmagi::collectives
