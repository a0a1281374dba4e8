#pragma once

#include <cstdint>

namespace jaxmagi {

// FNV-1a, by numbers instead of bytes. Ranks compare such hashes to find out that they mean different things.
class Hash {
public:
    void add(uint64_t number) { value_ = (value_ ^ number) * 1099511628211u; }
    uint64_t value() const { return value_; }

private:
    uint64_t value_ = 14695981039346656037u;
};

}  // namespace jaxmagi
