#pragma once

#include <array>
#include <cstdint>

namespace jaxmagi::collectives {

// Where a rank runs. Trivially copyable, to be sent to other ranks.
struct Identity {
    std::array<char, 128> host;
    int64_t pid;     // not unique across containers,
    uint64_t token;  // so each process draws one as well
    int ordinal;     // of its device, as its process numbers them

    bool shares_host(const Identity& other) const { return host == other.host; }
    bool shares_process(const Identity& other) const {
        return shares_host(other) and pid == other.pid and token == other.token;
    }
};

Identity identity_of(int ordinal);

}  // namespace jaxmagi::collectives
