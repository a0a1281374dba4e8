#include "csrc/collectives/statistics.h"

#include <atomic>

namespace jaxmagi::collectives {
namespace {

struct Counters {
    std::atomic<int64_t> transfers, native_bytes, nccl_bytes, nccl_messages, control_bytes;
};

Counters counters{};

}  // namespace

void count_transfer() {
    ++counters.transfers;
}

void count_native(int64_t bytes) {
    counters.native_bytes += bytes;
}

void count_nccl(int64_t messages, int64_t bytes, int64_t control_bytes) {
    counters.nccl_messages += messages;
    counters.nccl_bytes += bytes;
    counters.control_bytes += control_bytes;
}

Statistics counted_on_host() {
    return {.transfers = counters.transfers,
            .native_bytes = counters.native_bytes,
            .nccl_bytes = counters.nccl_bytes,
            .nccl_messages = counters.nccl_messages,
            .control_bytes = counters.control_bytes};
}

}  // namespace jaxmagi::collectives
