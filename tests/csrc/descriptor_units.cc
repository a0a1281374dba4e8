// Tests the exchange of file descriptors between processes. Each rank is a process, and its file has its rank.

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "csrc/collectives/descriptor_exchange.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;
using std::chrono::milliseconds;

FileDescriptor make_file(int content) {
    FileDescriptor file(memfd_create("content", MFD_CLOEXEC));
    return write(file.number(), &content, sizeof content) == sizeof content ? std::move(file) : FileDescriptor();
}

int content_of(const FileDescriptor& file) {
    int content = -1;
    return pread(file.number(), &content, sizeof content, 0) == sizeof content ? content : -1;
}

ptrdiff_t open_files() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// Made before the processes are forked, so that each knows all addresses.
using Exchanges = std::vector<std::unique_ptr<DescriptorExchange>>;

Exchanges make_exchanges(int ranks) {
    Exchanges exchanges;
    for (int i = 0; i < ranks; ++i)
        exchanges.push_back(std::make_unique<DescriptorExchange>());
    return exchanges;
}

std::map<int, SocketAddress> others_of(const Exchanges& exchanges, int rank) {
    std::map<int, SocketAddress> others;
    for (int peer = 0; peer < static_cast<int>(exchanges.size()); ++peer)
        if (peer != rank)
            others[peer] = exchanges[peer]->address();
    return others;
}

// Returns whether the rank gets the files of exactly these others.
bool gets(const Exchanges& exchanges, int rank, const std::set<int>& expected, milliseconds timeout) {
    const auto files = exchanges[rank]->run(rank, make_file(rank), others_of(exchanges, rank), timeout);
    std::set<int> senders;
    for (const auto& [sender, file] : files) {
        if (content_of(file) != sender)
            return false;
        senders.insert(sender);
    }
    return senders == expected;
}

// Forks a process per rank, of which each must get the files of all others.
bool all_get(const Exchanges& exchanges, const std::set<int>& ranks, milliseconds timeout) {
    std::vector<pid_t> processes;
    for (const int rank : ranks)
        if (const pid_t child = fork(); child == 0) {
            std::set<int> others = ranks;
            others.erase(rank);
            _exit(gets(exchanges, rank, others, timeout) ? 0 : 1);
        } else
            processes.push_back(child);
    bool good = true;
    for (const pid_t process : processes) {
        int status = 0;
        good &= waitpid(process, &status, 0) == process and status == 0;
    }
    return good;
}

// Sends more messages than some systems keep in a queue (net.unix.max_dgram_qlen).
bool many_ranks() {
    constexpr int kRanks = 64;
    std::set<int> ranks;
    for (int rank = 0; rank < kRanks; ++rank)
        ranks.insert(rank);
    return all_get(make_exchanges(kRanks), ranks, milliseconds(20000));
}

bool absent_rank() {
    return all_get(make_exchanges(5), {0, 1, 3, 4}, milliseconds(2000));
}

// The other rank has told its address and then ended.
bool dead_rank() {
    const std::map<int, SocketAddress> others{{1, DescriptorExchange().address()}};
    return DescriptorExchange().run(0, make_file(0), others, milliseconds(50)).empty();
}

bool another_network_namespace() {
    const Exchanges exchanges = make_exchanges(2);
    auto others = others_of(exchanges, 0);
    ++others[1].network_namespace;
    const auto begin = std::chrono::steady_clock::now();
    const bool is_empty = exchanges[0]->run(0, make_file(0), others, milliseconds(60000)).empty();
    return is_empty and std::chrono::steady_clock::now() - begin < milliseconds(30000);
}

// Sends a message with two descriptors, as any process could.
bool send_two(const FileDescriptor& file, const SocketAddress& to) {
    const FileDescriptor sender(socket(AF_UNIX, SOCK_DGRAM, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const int digits = std::snprintf(address.sun_path + 1, 32, "jaxmagi-%016" PRIx64, to.name);
    int files[2] = {file.number(), file.number()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof files)] = {};
    iovec content{&files, sizeof files};
    msghdr header{.msg_name = &address,
                  .msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + digits),
                  .msg_iov = &content,
                  .msg_iovlen = 1,
                  .msg_control = control,
                  .msg_controllen = sizeof control,
                  .msg_flags = 0};
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof files);
    std::memcpy(CMSG_DATA(rights), files, sizeof files);
    return sendmsg(sender.number(), &header, 0) == sizeof files;
}

bool nothing_stays_open() {
    const Exchanges exchanges = make_exchanges(2);
    const FileDescriptor file = make_file(0);
    const auto before = open_files();
    if (not send_two(file, exchanges[0]->address()))
        return false;
    exchanges[1]->run(1, file, others_of(exchanges, 1), milliseconds(20));
    const bool has_come = exchanges[0]->run(0, file, others_of(exchanges, 0), milliseconds(200)).size() == 1;
    exchanges[1]->run(1, file, others_of(exchanges, 1), milliseconds(20));
    return has_come and open_files() == before;
}

// Messages without the token, or of a rank that is none of the others, are ignored.
bool wrong_senders() {
    const Exchanges exchanges = make_exchanges(3);
    SocketAddress wrong = exchanges[0]->address();
    wrong.token ^= 1;
    exchanges[1]->run(1, make_file(9), {{0, wrong}}, milliseconds(50));
    exchanges[2]->run(7, make_file(9), {{0, exchanges[0]->address()}}, milliseconds(50));
    return exchanges[0]->run(0, make_file(0), {{1, exchanges[1]->address()}}, milliseconds(200)).empty();
}

bool no_others() {
    return DescriptorExchange().run(0, make_file(0), {}, milliseconds(1000)).empty();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    bool good = true;
    const auto check = [&](const char* name, bool (*run)()) {
        const bool is_so = run();
        std::printf("%s %s\n", is_so ? "ok  " : "FAIL", name);
        good &= is_so;
    };
    check("many ranks", many_ranks);
    check("a rank is absent", absent_rank);
    check("a rank is dead", dead_rank);
    check("another network namespace", another_network_namespace);
    check("wrong senders", wrong_senders);
    check("nothing stays open", nothing_stays_open);
    check("no others", no_others);
    return good ? 0 : 1;
}
