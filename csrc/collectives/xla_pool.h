#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include "csrc/collectives/file_descriptor.h"

// XLA's memory pool: the memory that XLA takes from the driver in advance, and in which it makes the buffers of a
// device. It is one allocation of CUDA's virtual memory management, which other processes of the host can map, so that
// their kernels access the buffers. All functions are for the current device. A failure is a result and not an error.

namespace jaxmagi::collectives {

struct Pool {
    char* begin;
    size_t bytes;

    bool contains(const void* buffer, size_t buffer_bytes) const;
};

// Returns the pool that a buffer is in: an allocation as large as the limit of XLA's allocator, so that there can be no
// other pool. There is none where XLA takes memory as it goes, or where the memory cannot be exported.
std::optional<Pool> find_pool(const void* xla_buffer, size_t limit);

// Returns a descriptor by which other processes map the pool, if there is one.
FileDescriptor export_pool(const Pool& pool);

// Maps the pool of another process. It keeps the physical memory allocated, even if the other process has ended.
class MappedPool {
public:
    MappedPool(const FileDescriptor& exported, size_t bytes);
    MappedPool(MappedPool&& other) noexcept : begin_(std::exchange(other.begin_, nullptr)), bytes_(other.bytes_) {}
    MappedPool& operator=(MappedPool&&) = delete;
    ~MappedPool();

    char* begin() const { return begin_; }  // null if mapping has failed

private:
    char* begin_ = nullptr;
    size_t bytes_;
};

}  // namespace jaxmagi::collectives
