#pragma once

#include "csrc/collectives/checks.cuh"
#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/system_memory.cuh"

// The barriers between native peers at the start and at the end of a call, for all threads of all CTAs.
//
//   start   CTA 0 stores the published addresses of the rank's arrays and the hash of the call into the control block
//           of each native peer, and then `ready = epoch` (release). Every CTA waits in its rank's control block until
//           `ready` of each native peer reaches the epoch (acquire), and only then accesses that peer's memory.
//   end     The last CTA to finish stores `done = epoch` (release) to each native peer and waits for theirs. Then no
//           peer accesses this rank's arrays any more, and what peers store there is complete. Now it also compares how
//           many rows it sends to each peer with how many that peer expects.
//
// Flags are epochs, which only grow, so that nothing has to be reset. A rank that waits for longer than the time limit,
// or reads the hash of a different call, ends the program.

namespace jaxmagi::collectives {

// State of a call in the shared memory of a CTA.
struct CallState {
    uint64_t addresses[kMaxNativeRanks][kMaxArrays];  // of this rank's and its native peers' arrays on this device
    RowCounts rows;
    uint32_t epoch;
};

// Calls visit(slot) on one lane of a warp for each native peer.
template <typename Visit> __device__ __forceinline__ void for_native_peers(const TransferParams& params, Visit visit) {
    for (int slot = threadIdx.x % kWarp; slot < params.num_slots; slot += kWarp)
        if (slot != params.slot and params.is_native(slot))
            visit(slot);
}

__device__ inline void wait_for(const TransferParams& params, const uint32_t* flag, uint32_t epoch, int slot,
                                const char* what) {
    const uint64_t begin = sm90::nanoseconds();
    while (static_cast<int32_t>(sm90::load_acquire(flag) - epoch) < 0) {
        if (sm90::nanoseconds() - begin < params.timeout_ns)
            continue;
        const auto [name, place] = native_text(params);
        abort_kernel("jaxmagi: rank %d of %d waited for %d ms until rank %d %s (%s%s, call %u of its group)\n",
                     params.rank, params.size, static_cast<int>(params.timeout_ns / 1000000), params.ranks[slot], what,
                     name, place, epoch);
    }
}

__device__ inline void signal_ready(const TransferParams& params, uint32_t epoch) {
    for_native_peers(params, [&](int slot) {
        PeerSignals& signals = params.controls[slot]->from[params.slot];
        for (int i = 0; i < params.num_arrays; ++i)
            sm90::store_relaxed(&signals.arrays[i], params.published[i]);
        sm90::store_relaxed(&signals.call_hash, params.call_hash);
        sm90::store_release(&signals.ready, epoch);
    });
}

// Checks all entries, and stores the counts of rows for `compare_rows`. Without this, a send of rows beyond the
// last row would be skipped silently, since it meets no chunk.
__device__ inline void check_entries_and_publish_rows(const TransferParams& params, CallState& call) {
    ControlBlock& control = *params.controls[params.slot];
    const auto check = [&](const auto* entries, int64_t i) { check_entry(params, entries, i); };
    count_rows(params, params.receives, call.rows, check);
    if (threadIdx.x < kWarp)
        for_native_peers(params, [&](int slot) {
            PeerSignals& signals = params.controls[slot]->from[params.slot];
            sm90::store_relaxed(&signals.rows[call.epoch % 2], call.rows.at_slot[slot]);
        });
    count_rows(params, params.sends, call.rows, check);
    if (threadIdx.x < kWarp)
        for_native_peers(params, [&](int slot) {
            const unsigned long long rows = call.rows.at_slot[slot];
            control.sent[slot] = rows;
            atomicAdd(reinterpret_cast<unsigned long long*>(&control.native_bytes), rows * params.row_bytes());
        });
}

__device__ inline void compare_rows(const TransferParams& params, uint32_t epoch, int slot) {
    const ControlBlock& control = *params.controls[params.slot];
    check_same_rows(params.rank, params.ranks[slot], __ldcg(&control.sent[slot]),
                    sm90::load_relaxed(&control.from[slot].rows[epoch % 2]), native_text(params));
}

__device__ inline void wait_until_ready(const TransferParams& params, CallState& call) {
    const ControlBlock& control = *params.controls[params.slot];
    if (threadIdx.x == 0) {
        call.epoch = __ldcg(&control.epoch) + 1;  // bypasses L1, which may hold the value before the last kernel
        for (int i = 0; i < params.num_arrays; ++i)
            call.addresses[params.slot][i] = params.resolve(params.published[i], params.slot);
    }
    __syncwarp();
    if (not params.has_native_peers())
        return;
    if (blockIdx.x == 0)
        signal_ready(params, call.epoch);
    for_native_peers(params, [&](int slot) {
        const PeerSignals& signals = control.from[slot];
        wait_for(params, &signals.ready, call.epoch, slot, "came to the same call");
        check_same_call(params.rank, params.ranks[slot], params.call_hash, sm90::load_relaxed(&signals.call_hash),
                        native_text(params));
        for (int i = 0; i < params.num_arrays; ++i)
            call.addresses[slot][i] = params.resolve(sm90::load_relaxed(&signals.arrays[i]), slot);
    });
}

__device__ inline void barrier_at_start(const TransferParams& params, CallState& call) {
    if (threadIdx.x < kWarp)
        wait_until_ready(params, call);
    __syncthreads();
    if (blockIdx.x == 0)
        check_entries_and_publish_rows(params, call);
    // Flags are ordinary accesses, and the bulk copies that follow access peers' memory by the async proxy.
    sm90::fence_global_for_async();
}

__device__ inline void finish_cta(const TransferParams& params, const CallState& call) {
    ControlBlock& control = *params.controls[params.slot];
    unsigned finished = 0;
    if (threadIdx.x == 0) {
        __threadfence_system();
        finished = atomicAdd(&control.finished_ctas, 1);
    }
    if (__shfl_sync(~0u, finished, 0) + 1 < gridDim.x)
        return;
    __threadfence_system();
    __syncwarp();  // what lane 0 saw of the other CTAs is now visible to all lanes, which signal the peers
    for_native_peers(params, [&](int slot) {
        sm90::store_release(&params.controls[slot]->from[params.slot].done, call.epoch);
    });
    for_native_peers(params, [&](int slot) {
        wait_for(params, &control.from[slot].done, call.epoch, slot, "finished the call");
        compare_rows(params, call.epoch, slot);
    });
    __syncwarp();
    if (threadIdx.x == 0) {
        control.next_chunk = control.finished_ctas = 0;
        control.epoch = call.epoch;
    }
}

// The thread's own accesses to peers' memory must be complete.
__device__ inline void barrier_at_end(const TransferParams& params, const CallState& call) {
    sm90::fence_global_for_async();
    __syncthreads();
    if (threadIdx.x < kWarp)
        finish_cta(params, call);
}

}  // namespace jaxmagi::collectives
