#pragma once

#include <cstddef>
#include <span>

#include "csrc/collectives/peers.h"

// What lets the kernels of other processes use buffers of XLA.

namespace jaxmagi::collectives {

struct XlaBuffer {
    const void* begin;
    size_t bytes;
};

// How much memory XLA's allocator may take of a device of this process, by its own account; 0 if that is not known.
void set_memory_limit(int ordinal, size_t bytes);

// Before a call with these buffers on this rank. The first time all ranks of the group map each other's pools, if all
// can; else it makes all arenas at least as large as the buffers in all, with undefined contents. Does nothing where
// `shares_process` holds: there, kernels address the buffers themselves. Collective and blocking like `peers_of`, with
// as many bytes on all ranks. Throws on all ranks where one has too little memory for an arena or access to one.
void share_buffers(Peers& peers, const Exchange& exchange, std::span<const XlaBuffer> buffers);

// Lets go of what the other ranks share; the own arena is freed with the rest. With the device at rest.
void stop_sharing(Peers& peers);

}  // namespace jaxmagi::collectives
