#include "csrc/collectives/descriptor_mail.h"

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
#include <random>
#include <utility>

namespace jaxmagi::collectives {
namespace {

struct Letter {
    uint64_t token;  // of the receiver: others on the host may send to the socket too
    int64_t sender;
};

// A name without a file: it begins with zero.
std::pair<sockaddr_un, socklen_t> socket_address(const MailAddress& of) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    constexpr int kDigits = 32;
    const int digits = std::snprintf(address.sun_path + 1, kDigits, "jaxmagi-%016" PRIx64, of.name);
    return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + digits)};
}

// A message of one letter with room for one descriptor: the system closes further ones.
struct Envelope {
    explicit Envelope(Letter& letter) : content{&letter, sizeof letter} {
        header.msg_iov = &content;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = CMSG_LEN(sizeof(int));
    }
    Envelope(const Envelope&) = delete;
    Envelope& operator=(const Envelope&) = delete;

    iovec content;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
};

enum class Fate { kSent, kLater, kLost };

// Later, if the receiver has too many letters waiting or the system too many descriptors under way.
Fate send(int socket, Letter letter, int descriptor, const MailAddress& to) {
    auto [address, length] = socket_address(to);
    Envelope envelope(letter);
    envelope.header.msg_name = &address;
    envelope.header.msg_namelen = length;
    cmsghdr* const rights = CMSG_FIRSTHDR(&envelope.header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
    if (sendmsg(socket, &envelope.header, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof letter)
        return Fate::kSent;
    const bool is_full = errno == EAGAIN or errno == ENOBUFS or errno == ETOOMANYREFS or errno == EINTR;
    return is_full ? Fate::kLater : Fate::kLost;
}

// Who has sent what, if there is a letter with a descriptor and the token.
std::optional<std::pair<int, FileDescriptor>> receive(int socket, uint64_t token) {
    Letter letter{};
    Envelope envelope(letter);
    const ssize_t bytes = recvmsg(socket, &envelope.header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const cmsghdr* const rights = bytes < 0 ? nullptr : CMSG_FIRSTHDR(&envelope.header);
    if (rights == nullptr or rights->cmsg_level != SOL_SOCKET or rights->cmsg_type != SCM_RIGHTS or
        rights->cmsg_len != CMSG_LEN(sizeof(int)))
        return std::nullopt;
    int number;
    std::memcpy(&number, CMSG_DATA(rights), sizeof number);
    FileDescriptor descriptor(number);
    if (bytes != sizeof letter or letter.token != token)
        return std::nullopt;
    return std::pair(static_cast<int>(letter.sender), std::move(descriptor));
}

// As the system numbers it; 0 if it does not tell.
uint64_t network_namespace() {
    struct stat status{};
    return stat("/proc/self/ns/net", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

DescriptorMail::DescriptorMail()
    : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)), network_(network_namespace()) {
    std::random_device random;
    for (uint64_t* const number : {&name_, &token_})
        *number = uint64_t{random()} << 32 | random();
    const auto [own, length] = socket_address(address());
    if (socket_ and bind(socket_.number(), reinterpret_cast<const sockaddr*>(&own), length) != 0)
        socket_ = FileDescriptor();
}

MailAddress DescriptorMail::address() const {
    return {.has_socket = static_cast<bool>(socket_), .name = name_, .network = network_, .token = token_};
}

// Letters that do not fit into a full mailbox are tried again; meanwhile the own one is emptied, so that nobody waits
// for somebody who waits too.
std::map<int, FileDescriptor> DescriptorMail::swap(int rank, const FileDescriptor& descriptor,
                                                   std::map<int, MailAddress> others,
                                                   std::chrono::milliseconds timeout) const {
    constexpr int kWaitMs = 5;
    std::erase_if(others, [&](const auto& other) { return other.second.network != network_; });
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::map<int, MailAddress> to_send = others;
    std::map<int, FileDescriptor> received;
    while (socket_ and not(to_send.empty() and received.size() == others.size()) and
           std::chrono::steady_clock::now() < deadline) {
        std::erase_if(to_send, [&](const auto& other) {
            const auto& [peer, address] = other;
            return send(socket_.number(), {address.token, rank}, descriptor.number(), address) != Fate::kLater;
        });
        pollfd waiting{.fd = socket_.number(), .events = POLLIN, .revents = 0};
        if (poll(&waiting, 1, kWaitMs) <= 0)
            continue;
        auto letter = receive(socket_.number(), token_);
        if (letter and others.contains(letter->first))
            received.insert(std::move(*letter));
    }
    return received;
}

}  // namespace jaxmagi::collectives
