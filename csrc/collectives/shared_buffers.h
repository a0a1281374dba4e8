#pragma once

#include <cstddef>
#include <span>

#include "csrc/collectives/peers.h"

// What lets the kernels of other processes use buffers of XLA.

namespace jaxmagi::collectives {

// How much memory XLA's allocator may take of a device of this process, by its own account; 0 if that is not known.
void set_memory_limit(int ordinal, size_t bytes);

// Before a call of which other ranks use so many bytes of this one, and with these buffers, of XLA's own making. The
// first time all ranks of the group map each other's pools, if all can; else it makes all arenas at least as large,
// with undefined contents. Does nothing where `shares_process` holds: there, kernels address the buffers themselves.
// Collective and blocking like `peers_of`, with as many bytes on all ranks. Throws on all ranks where one has too
// little memory for an arena or access to one.
void share_buffers(Peers& peers, const Exchange& exchange, size_t bytes, std::span<const void* const> xla_buffers);

// Lets go of what the other ranks share; the own arena is freed with the rest. With the device at rest.
void stop_sharing(Peers& peers);

}  // namespace jaxmagi::collectives
