#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "csrc/collectives/transfer_order.h"

namespace jaxmagi::collectives {

struct MemoryBlock {
    void* data;
    size_t bytes;
};

// Keeps the device memory of a group's asynchronous transfers until they have ended, by their results. For one host
// thread at a time.
class HeldMemory {
public:
    void keep(Addresses results, std::vector<MemoryBlock> blocks) {
        if (not blocks.empty())
            entries_.push_back({std::move(results), std::move(blocks)});
    }

    // Returns the memory of the transfer with these results, which is not kept any more.
    std::vector<MemoryBlock> take(const Addresses& results) {
        const auto found = std::ranges::find(entries_, results, &Entry::results);
        if (found == entries_.end())
            return {};
        std::vector<MemoryBlock> blocks = std::move(found->blocks);
        entries_.erase(found);
        return blocks;
    }

    // Returns all memory: no transfer is in flight, but a program may have failed before the end of one.
    std::vector<MemoryBlock> take_all() {
        std::vector<MemoryBlock> blocks;
        for (const Entry& entry : entries_)
            blocks.insert(blocks.end(), entry.blocks.begin(), entry.blocks.end());
        entries_.clear();
        return blocks;
    }

private:
    struct Entry {
        Addresses results;
        std::vector<MemoryBlock> blocks;
    };

    std::vector<Entry> entries_;
};

}  // namespace jaxmagi::collectives
