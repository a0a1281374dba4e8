#pragma once

#include "csrc/attention/sm90/forward/config.cuh"
#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/tma.cuh"

namespace jaxmagi::sm90 {

// One thread of the producer's warpgroup that stores the outputs which the consumer warpgroups leave in shared memory,
// one after the other. So no consumer waits until its output was read.
template <typename Config> struct ForwardOutputStore {
    ForwardMemory<Config> memory;
    const CUtensorMap& map;
    int pack_shift;

    __device__ __forceinline__ void run() const {
#pragma unroll 1
        for (int item = 0, num_blocks = 0; num_blocks >= 0; ++item) {
#pragma unroll 1
            for (int warpgroup = 0; warpgroup < Config::kConsumers; ++warpgroup) {
                memory.out_full().wait(memory.out_full_parity(item, warpgroup));
                const ForwardWorkItem& work = memory.work_item(item);
                num_blocks = work.num_blocks;
                if (num_blocks > 0)
                    store(work, warpgroup);
                memory.out_empty((warpgroup + 1) % Config::kConsumers).arrive();
            }
        }
    }

private:
    __device__ __forceinline__ void store(const ForwardWorkItem& work, int warpgroup) const {
        const int position = work.row + (warpgroup * 64 >> pack_shift);
#pragma unroll
        for (int panel = 0; panel < panels(Config::kVDim); ++panel)
            tma_store(map, {panel * kPanelColumns, work.head, position, work.example},
                      memory.out() + panel * 64 * kPanelRowBytes);
        bulk_commit();
        bulk_wait_read<0>();
    }
};

}  // namespace jaxmagi::sm90
