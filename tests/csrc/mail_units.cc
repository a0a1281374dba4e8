// File descriptors from process to process: each rank is a process of its own, and its descriptor a file with its rank.

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
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/collectives/descriptor_mail.h"

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

// Made before the processes are, so that each knows all addresses.
using Mails = std::vector<std::unique_ptr<DescriptorMail>>;

Mails make_mails(int ranks) {
    Mails mails;
    for (int i = 0; i < ranks; ++i)
        mails.push_back(std::make_unique<DescriptorMail>());
    return mails;
}

std::map<int, MailAddress> others_of(const Mails& mails, int rank) {
    std::map<int, MailAddress> others;
    for (int peer = 0; peer < static_cast<int>(mails.size()); ++peer)
        if (peer != rank)
            others[peer] = mails[peer]->address();
    return others;
}

// Whether the rank gets the files of exactly these others.
bool gets(const Mails& mails, int rank, const std::set<int>& expected, milliseconds timeout) {
    const auto files = mails[rank]->swap(rank, make_file(rank), others_of(mails, rank), timeout);
    std::set<int> senders;
    for (const auto& [sender, file] : files) {
        if (content_of(file) != sender)
            return false;
        senders.insert(sender);
    }
    return senders == expected;
}

// Whether all processes say so.
bool all(const std::set<int>& ranks, const std::function<bool(int)>& run) {
    std::vector<pid_t> processes;
    for (const int rank : ranks)
        if (const pid_t child = fork(); child == 0)
            _exit(run(rank) ? 0 : 1);
        else
            processes.push_back(child);
    bool good = true;
    for (const pid_t process : processes) {
        int status = 0;
        good &= waitpid(process, &status, 0) == process and status == 0;
    }
    return good;
}

std::set<int> up_to(int ranks) {
    std::set<int> all;
    for (int rank = 0; rank < ranks; ++rank)
        all.insert(rank);
    return all;
}

std::set<int> without(std::set<int> ranks, int rank) {
    ranks.erase(rank);
    return ranks;
}

// More letters than some systems keep in a mailbox (net.unix.max_dgram_qlen).
bool many_ranks() {
    constexpr int kRanks = 64;
    const Mails mails = make_mails(kRanks);
    const auto ranks = up_to(kRanks);
    return all(ranks, [&](int rank) { return gets(mails, rank, without(ranks, rank), milliseconds(20000)); });
}

bool absent_rank() {
    constexpr int kAbsent = 2;
    const Mails mails = make_mails(5);
    const auto ranks = without(up_to(5), kAbsent);
    return all(ranks, [&](int rank) { return gets(mails, rank, without(ranks, rank), milliseconds(2000)); });
}

// It has given its address, and is gone.
bool dead_rank() {
    const DescriptorMail mail;
    std::map<int, MailAddress> others;
    others[1] = DescriptorMail().address();
    return mail.swap(0, make_file(0), others, milliseconds(50)).empty();
}

bool another_network() {
    const Mails mails = make_mails(2);
    auto others = others_of(mails, 0);
    ++others[1].network;
    const auto begin = std::chrono::steady_clock::now();
    const bool is_empty = mails[0]->swap(0, make_file(0), others, milliseconds(60000)).empty();
    return is_empty and std::chrono::steady_clock::now() - begin < milliseconds(30000);
}

// A letter as somebody else could write it, with two descriptors.
bool send_two(const FileDescriptor& file, const MailAddress& to) {
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
    const Mails mails = make_mails(2);
    const FileDescriptor file = make_file(0);
    const auto before = open_files();
    if (not send_two(file, mails[0]->address()))
        return false;
    mails[1]->swap(1, file, others_of(mails, 1), milliseconds(20));
    const bool has_come = mails[0]->swap(0, file, others_of(mails, 0), milliseconds(200)).size() == 1;
    mails[1]->swap(1, file, others_of(mails, 1), milliseconds(20));
    return has_come and open_files() == before;
}

// Who does not know the token, or is none of the others, is not heard.
bool strangers() {
    const Mails mails = make_mails(3);
    MailAddress wrong = mails[0]->address();
    wrong.token ^= 1;
    mails[1]->swap(1, make_file(9), {{0, wrong}}, milliseconds(50));
    mails[2]->swap(7, make_file(9), {{0, mails[0]->address()}}, milliseconds(50));
    const auto files = mails[0]->swap(0, make_file(0), {{1, mails[1]->address()}}, milliseconds(200));
    return files.empty();
}

bool nobody_else() {
    return DescriptorMail().swap(0, make_file(0), {}, milliseconds(1000)).empty();
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
    check("another network", another_network);
    check("strangers", strangers);
    check("nothing stays open", nothing_stays_open);
    check("nobody else", nobody_else);
    return good ? 0 : 1;
}
