#pragma once

#include <cstdio>
#include <exception>

#include "csrc/collectives/peers.h"
#include "xla_ffi/checks.h"
#include "xla_ffi/communicator.h"

// The groups of ranks that handlers of this process belong to, by device and by the ids along their mesh axis.

namespace jaxmagi {

// All groups along a mesh axis, each `size` ids, one after the other.
struct GroupIds {
    DeviceIds ids;
    int64_t size;
};

// For Initialize, with which every execution begins: connects the current device's group, and loads the kernels.
collectives::Peers& connect_group(const GroupIds& group, const collectives::Bootstrap& bootstrap);

// For Execute: returns a connected group. Asking XLA for its communicator takes longer than a short transfer.
collectives::Peers& connected_group(const GroupIds& group);

// Prints an error before XLA gets it: other ranks of this process may wait for this one until their time limit, which
// ends the process before XLA has told anybody.
template <typename Body> auto guarded_aloud(const char* handler, Body body) {
    return guarded(handler, [&] {
        try {
            return body();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "jaxmagi: %s\n", error.what());
            throw;
        }
    });
}

}  // namespace jaxmagi
