#pragma once

#include <cstddef>
#include <span>

#include "csrc/collectives/peers.h"

// Maps the memory of ranks in other processes, so that kernels access its rows.

namespace jaxmagi::collectives {

// Tells how much memory XLA's allocator may take of a device of this process, or 0 if that is not known.
void set_memory_limit(int ordinal, size_t bytes);

// Before a call in which other ranks access `bytes` of this rank, and in which XLA has made these buffers: lets the
// ranks of the group access each other's arrays. The first time, all ranks map each other's XLA pools, if all of them
// can. Otherwise it makes each staging buffer at least as large as `bytes`, with undefined contents. Does nothing where
// `is_one_process` holds: there, kernels address the buffers themselves. Collective and blocking as `connect_peers` is,
// with equal `bytes` on all ranks. Throws on all ranks if one has too little memory for a staging buffer, or no access.
void map_peers(Peers& peers, const Bootstrap& bootstrap, size_t bytes, std::span<const void* const> xla_buffers);

// Unmaps the memory of the other ranks; `finalize` frees this rank's staging buffer later. The device must be idle.
void unmap_peers(Peers& peers);

}  // namespace jaxmagi::collectives
