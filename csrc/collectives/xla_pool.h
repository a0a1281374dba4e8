#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include "csrc/collectives/file_descriptor.h"

// The memory that XLA has taken from the driver in advance, and makes the buffers of a device in. It is one allocation
// of CUDA's virtual memory management, which other processes on the host can map: then their kernels use the buffers
// themselves. Always with the current device; what fails is a no, not an error.

namespace jaxmagi::collectives {

struct Pool {
    char* begin;
    size_t bytes;

    bool contains(const void* buffer, size_t buffer_bytes) const;
};

// The pool that a buffer is in: an allocation as large as all that XLA's allocator may ever take, its limit, so that
// there can be no other. None where XLA takes memory as it goes, and where the memory cannot be exported.
std::optional<Pool> find_pool(const void* xla_buffer, size_t limit);

// What stands for the pool in other processes, if anything does.
FileDescriptor export_pool(const Pool& pool);

// The pool of another process in the address space of this one. Its memory stays taken meanwhile, even if the other
// process has ended.
class MappedPool {
public:
    MappedPool(const FileDescriptor& pool, size_t bytes);
    MappedPool(MappedPool&& other) noexcept : begin_(std::exchange(other.begin_, nullptr)), bytes_(other.bytes_) {}
    MappedPool& operator=(MappedPool&&) = delete;
    ~MappedPool();

    char* begin() const { return begin_; }  // null if it could not be mapped

private:
    char* begin_ = nullptr;
    size_t bytes_;
};

}  // namespace jaxmagi::collectives
