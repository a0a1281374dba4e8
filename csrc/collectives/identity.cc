#include "csrc/collectives/identity.h"

#include <unistd.h>

#include <fstream>
#include <random>
#include <string>

namespace jaxmagi::collectives {
namespace {

// The boot's id and the host's name. Copies of a virtual machine may have the same id, hosts the same name; if both are
// equal by mistake, then opening the other's memory fails.
std::array<char, 128> host() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string boot_id;
    std::getline(file, boot_id);
    char name[65] = {};  // Linux has 64 at most
    gethostname(name, sizeof name - 1);
    std::array<char, 128> host{};
    (boot_id + " " + name).copy(host.data(), host.size());
    return host;
}

uint64_t draw_token() {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
}

}  // namespace

Identity identity_of(int ordinal) {
    static const uint64_t token = draw_token();
    return {.host = host(), .pid = getpid(), .token = token, .ordinal = ordinal};
}

}  // namespace jaxmagi::collectives
