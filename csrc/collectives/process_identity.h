#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <string_view>

namespace jaxmagi::collectives {

// Tells ranks which of them run on the same host and in the same process. Trivially copyable, to be sent to them.
struct ProcessIdentity {
    std::array<char, 128> host;
    int64_t pid;     // not unique across containers, so that
    uint64_t token;  // each process also draws a random number
    int ordinal;     // of the rank's device in its process

    // Returns the host's name; `host` begins with the boot id.
    std::string host_name() const {
        const std::string_view all(host.data(), strnlen(host.data(), host.size()));
        const size_t blank = all.find(' ');
        return std::string(blank == all.npos ? all : all.substr(blank + 1));
    }

    bool shares_host(const ProcessIdentity& other) const { return host == other.host; }
    bool shares_process(const ProcessIdentity& other) const {
        return shares_host(other) and pid == other.pid and token == other.token;
    }
};

inline uint64_t random_token() {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
}

inline ProcessIdentity identity_of(int ordinal) {
    static const uint64_t token = random_token();
    ProcessIdentity identity{.host = {}, .pid = getpid(), .token = token, .ordinal = ordinal};
    // Copies of a virtual machine may have equal boot ids, and hosts equal names. If both are equal by mistake, opening
    // the other rank's memory fails.
    std::string boot_id;
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::getline(file, boot_id);
    char name[65] = {};  // Linux allows 64 characters
    gethostname(name, sizeof name - 1);
    (boot_id + " " + name).copy(identity.host.data(), identity.host.size());
    return identity;
}

}  // namespace jaxmagi::collectives
