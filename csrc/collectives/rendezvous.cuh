#pragma once

#include "csrc/collectives/entries.cuh"
#include "csrc/collectives/row_counts.cuh"
#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/system_memory.cuh"

// How the ranks of a group come together for a call and part again. `meet` and `leave` are for all threads of all CTAs.
//
//   meet    The first CTA tells the native peers where the rank's buffers lie. Each CTA waits for all peers' news, and
//           only then touches their memory.
//   leave   When the last CTA is done, it tells the peers that their buffers are no more needed, and waits until they
//           have all said the same. Buffers are then free, and complete. By now it also knows how many rows the peers
//           expected.
//
// Flags are epochs, which only grow, so that nothing has to be reset. A rank that waits for too long, or hears of
// another call than its own, stops the program: it cannot go on, and its results must not be used.

namespace jaxmagi::collectives {

// What a CTA knows of the call, in shared memory.
struct Meeting {
    uint64_t addresses[kMaxRanks][kMaxArrays];  // of the native peers' sides of the arrays
    RowCounts rows;
    uint32_t epoch;
};

// Calls visit(peer) on some lane for each native peer, the rank itself left out.
template <typename Visit> __device__ __forceinline__ void for_native_peers(const Transfer& transfer, Visit visit) {
    for (int peer = threadIdx.x % kWarp; peer < min(transfer.size, kMaxRanks); peer += kWarp)
        if (peer != transfer.rank and transfer.is_native(peer))
            visit(peer);
}

__device__ inline void wait_for(const Transfer& transfer, const uint32_t* flag, uint32_t epoch, int peer,
                                const char* what) {
    const uint64_t begin = sm90::nanoseconds();
    while (static_cast<int32_t>(sm90::load_acquire(flag) - epoch) < 0) {
        if (sm90::nanoseconds() - begin < transfer.timeout_ns)
            continue;
        stop("jaxmagi: rank %d of %d waited for %d ms until rank %d %s (call %u of its group)\n", transfer.rank,
             transfer.size, static_cast<int>(transfer.timeout_ns / 1000000), peer, what, epoch);
    }
}

__device__ __forceinline__ uint64_t address_of(const Transfer& transfer, uint64_t place, int peer) {
    return place & kInShared ? reinterpret_cast<uint64_t>(transfer.shared[peer]) + (place & ~kInShared) : place;
}

__device__ inline void tell_peers(const Transfer& transfer, uint32_t epoch) {
    for_native_peers(transfer, [&](int peer) {
        Mailbox& box = transfer.controls[peer]->from[transfer.rank];
        for (int i = 0; i < transfer.num_arrays; ++i)
            sm90::store_relaxed(&box.arrays[i], transfer.places[i]);
        sm90::store_relaxed(&box.call, transfer.call);
        sm90::store_release(&box.ready, epoch);
    });
}

// Tells the peers how many rows should come from them, and notes how many go to them, for `compare_rows`. Looks at
// every entry, which nobody else does: a send from behind the last row meets no chunk.
__device__ inline void note_rows(const Transfer& transfer, Meeting& meeting) {
    Control& control = *transfer.controls[transfer.rank];
    const auto look_at = [&](const auto* entries, int64_t i) { check_entry(transfer, entries, i); };
    count_rows(transfer, transfer.receives, meeting.rows, look_at);
    if (threadIdx.x < kWarp)
        for_native_peers(transfer, [&](int peer) {
            Mailbox& box = transfer.controls[peer]->from[transfer.rank];
            sm90::store_relaxed(&box.rows[meeting.epoch % 2], meeting.rows.of_peer[peer]);
        });
    count_rows(transfer, transfer.sends, meeting.rows, look_at);
    if (threadIdx.x < kWarp)
        for_native_peers(transfer, [&](int peer) { control.sent[peer] = meeting.rows.of_peer[peer]; });
}

__device__ inline void compare_rows(const Transfer& transfer, uint32_t epoch, int peer) {
    const Control& control = *transfer.controls[transfer.rank];
    check_same_rows(transfer.rank, peer, __ldcg(&control.sent[peer]),
                    sm90::load_relaxed(&control.from[peer].rows[epoch % 2]));
}

__device__ inline void meet_by_warp(const Transfer& transfer, Meeting& meeting) {
    const Control& control = *transfer.controls[transfer.rank];
    if (threadIdx.x == 0) {
        meeting.epoch = __ldcg(&control.epoch) + 1;  // of the kernel before, of which L1 knows nothing
        for (int i = 0; i < transfer.num_arrays; ++i)
            meeting.addresses[transfer.rank][i] = address_of(transfer, transfer.places[i], transfer.rank);
    }
    __syncwarp();
    if (not transfer.has_native_peers())
        return;
    if (blockIdx.x == 0)
        tell_peers(transfer, meeting.epoch);
    for_native_peers(transfer, [&](int peer) {
        const Mailbox& box = control.from[peer];
        wait_for(transfer, &box.ready, meeting.epoch, peer, "came to the same call");
        check_same_call(transfer, peer, sm90::load_relaxed(&box.call));
        for (int i = 0; i < transfer.num_arrays; ++i)
            meeting.addresses[peer][i] = address_of(transfer, sm90::load_relaxed(&box.arrays[i]), peer);
    });
}

__device__ inline void meet(const Transfer& transfer, Meeting& meeting) {
    if (threadIdx.x < kWarp)
        meet_by_warp(transfer, meeting);
    __syncthreads();
    if (blockIdx.x == 0)
        note_rows(transfer, meeting);
    sm90::fence_global_for_async();  // the peers' memory is for bulk copies, the flags were not
}

__device__ inline void leave_by_warp(const Transfer& transfer, const Meeting& meeting) {
    Control& control = *transfer.controls[transfer.rank];
    unsigned finished = 0;
    if (threadIdx.x == 0) {
        __threadfence_system();
        finished = atomicAdd(&control.finished_ctas, 1);
    }
    if (__shfl_sync(~0u, finished, 0) + 1 < gridDim.x)
        return;
    __threadfence_system();
    __syncwarp();  // what the first lane saw of the other CTAs holds for all that tell the peers
    for_native_peers(transfer, [&](int peer) {
        sm90::store_release(&transfer.controls[peer]->from[transfer.rank].done, meeting.epoch);
    });
    for_native_peers(transfer, [&](int peer) {
        wait_for(transfer, &control.from[peer].done, meeting.epoch, peer, "finished the call");
        compare_rows(transfer, meeting.epoch, peer);
    });
    __syncwarp();
    if (threadIdx.x == 0) {
        control.next_chunk = control.finished_ctas = 0;
        control.epoch = meeting.epoch;
    }
}

// After all that the thread does with peers' memory is complete.
__device__ inline void leave(const Transfer& transfer, const Meeting& meeting) {
    sm90::fence_global_for_async();
    __syncthreads();
    if (threadIdx.x < kWarp)
        leave_by_warp(transfer, meeting);
}

}  // namespace jaxmagi::collectives
