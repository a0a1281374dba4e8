#pragma once

#include "csrc/attention/sm90/backward/consumer_narrow.cuh"
#include "csrc/attention/sm90/backward/consumer_wide.cuh"
#include "csrc/attention/sm90/backward/producer.cuh"
#include "csrc/attention/sm90/backward/reducer.cuh"
#include "csrc/attention/sm90/backward/scheduler.cuh"

// The backward kernel is persistent. A CTA has a scheduler warp, a producer warp, a reducer of one warp or, with a
// fixed order of sums, two, and Config::kConsumers consumer warpgroups. It claims work items, tiles of keys with a head
// set of one key head, or parts of them (schedule.cuh). dK and dV of an item stay in registers over all bands and
// heads. They are stored or, where a key head has several head sets, added to sums in global memory, as dQ of each step
// is. convert.cu converts the sums.
//
// A step is a block of queries of one head that sees keys of the tile. Schedule of a work item with steps 0 .. n - 1:
//   scheduler   writes a run of blocks for each head and band; claims the next tile once all loads of this one are
//               issued
//   producer    loads K V | Q0 dO0 | Q1 dO1 | ...   each when its stage is free
//   consumers   S(0), dP(0), P(0), dS(0); steps 0 .. n - 1; dK and dV are stored.
//               Step j begins with P(j) and dS(j). Its products are issued in the order in which they stand here, and
//               the last step leaves out all that has j + 1:
//               consumer_narrow.cuh (64, 80 or 128 queries, D up to 128):
//                        turn begins;  dK += dS(j)·Q(j);  dQ = dS(j-1)·K;  dV += P(j)·dO(j), dS(j) and dQ are stored
//                        meanwhile;  S(j+1) = K·Q(j+1);  dP(j+1) = V·dO(j+1);
//                        turn ends;  P(j+1), dS(j+1)
//                        The first step leaves out dQ; the last one computes that of its own dS when its turn is over
//               consumer_wide.cuh (64 queries, D above 128):
//                        P(j) and dS(j) are stored;  dV += P(j)·dO(j);  dK += dS(j)·Q(j);  dQ = dS(j)·K;
//                        S(j+1) = Q(j+1)·K, dQ is stored meanwhile (with three warpgroups, before);
//                        dP(j+1) = dO(j+1)·V, P(j+1) is computed meanwhile;  dS(j+1)
//   reducer     adds dQ(j) to the sums while the consumers go on, with a fixed order when its ticket comes up; behind
//               the last step dK and dV, if they are sums
// The two consumer warpgroups of narrow kernels take turns: while one issues the products of a step, the other computes
// P and dS. S(0) and dP(0) have a turn of their own. Therefore dQ is that of the step before, of which both warpgroups
// have stored dS, and dK, behind which Q is loaded again, comes before dQ and dV.
// All variants wait for the product of dQ before hand_over_dq.
//
// Mbarriers (arrivals of a phase), who completes them, and what they protect:
//   run_full (1)   scheduler          a run and, with the first run of a work item, the work item
//   run_empty (1)  producer           the run, once the loads of its last block are issued. It also keeps work items
//                                     from being overwritten (BackwardMemory)
//   kv_full (1)    producer and TMA   keys and values of a tile, and with them the work item; of a work item without
//                                     steps, and at the end, the producer alone
//   kv_empty (all consumer warps)     keys and values, after their last product. Every warp has then stored the
//                                     gradients of the work item before
//   q_full (1)     producer and TMA   queries of a step, their row statistics, and the descriptor of the step
//   q_empty (consumer warpgroups)     the queries, after the product for dK
//   dout_full (1)  producer and TMA   dO of a step
//   dout_empty (consumer warpgroups)  dO, after the product for dV
//   described (1)  producer           the descriptor of a step, for the reducer, which two behind the last step end
//   ds_full (all consumer warps)      narrow kernels: dS of a step, for dQ. A warpgroup fences after it has waited:
//                                     before it arrives, it would wait for its own stores to complete
//   ds_empty (consumer warpgroups)    narrow kernels: one of two places for dS, after the product for dQ
// Named barriers:
//   kTensorTurn + i (consumers)  narrow kernels: warpgroup i may issue the products of a step. The other one passes the
//                                turn on behind dP or, in the last step, dV, so that the last dQ is issued
//                                outside of turns; the first turn is that of warpgroup 0
//   kLogitsStored (consumers)  wide kernels: P and dS of all keys of the tile are stored, for dV, dK and dQ
//   kLogitsRead (consumers)    wide kernels: P and dS may be overwritten, since all warpgroups have waited for the
//                              products of the step before
//   kZeroFilled (consumers)    keys and values that no query sees are zero-filled
//   kRowsZeroFilled + i (warpgroup i)  fully masked rows of Q and dO are zero-filled
//   kPartEmpty + i (warpgroup i and the reducer)  the warpgroup's part, of dQ, dK or dV, may be overwritten: the
//                                                 reducer has read the one before; it arrives once before it has read
//                                                 any
//   kPartFull + i (warpgroup i and the reducer)   the warpgroup's part is stored
//   kReducerTurn + i (the warps of the reducer)   the next parts are those of reducer warp i

namespace jaxmagi::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardTensorMaps maps, const __grid_constant__ BackwardArguments args) {
    extern __shared__ char raw[];
    const BackwardMemory<Config> memory(raw, false);
    const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
    // Opaque: ptxas would read the special register again between products, and wait for them.
    const int thread = opaque(static_cast<int>(threadIdx.x) % kWarpgroupThreads);
    if (warpgroup == 0 and thread == 0) {
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.dout);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
        prefetch_tensor_map(maps.own_k);
        prefetch_tensor_map(maps.own_v);
        memory.init_barriers();
        const int variant = choose_schedule(args);
        memory.current_tile().variant = variant;
        memory.schedule() = args.stages[0].variants[variant];
    }
    __syncthreads();
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<Config::kProducerRegisters>();
        const int lane = thread % 32;
        const int warp = uniform(thread / 32);
        if (warp == 0 and elect_lane())
            BackwardProducer<Config>{memory, maps, args}.run();
        else if (warp == 2)
            BackwardScheduler<Config>{memory, args, lane}.run();
        else if (warp == 1 or (warp == 3 and args.deterministic))
            BackwardReducer<Config>{memory, args, warp / 2}.run();
    } else {
        warpgroup_reg_alloc<Config::kConsumerRegisters>();
        // Computed again: ptxas would keep `warpgroup` in local memory.
        const ConsumerThread consumer{uniform(threadIdx.x / kWarpgroupThreads) - 1, thread};
        const BackwardMemory<Config> own_memory(raw, true);
        if constexpr (Config::kWide) {
            run_consumer(BackwardConsumerWide<Config>{own_memory, args, consumer});
        } else {
            const BackwardConsumerNarrow<Config> narrow{own_memory, args, consumer};
            narrow.give_first_turn();
            run_consumer(narrow);
        }
    }
}

}  // namespace jaxmagi::sm90
