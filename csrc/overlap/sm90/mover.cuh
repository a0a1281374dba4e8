#pragma once

#include "csrc/common/sm90/bulk.cuh"
#include "csrc/overlap/sm90/claims.cuh"

namespace jaxmagi::overlap {

// Moves panels of a consumer's rows: those for other ranks to these, those of other ranks to the consumer, and sums to
// the result. One warp is the mover of a consumer, and one lane of it does all but meet the consumer.
template <typename Config> struct GemmMover {
    GemmMemory<Config> memory;
    const GemmTensorMaps& maps;
    const GemmArguments& arguments;
    int consumer;

    __device__ __forceinline__ void run() const {
        const bool leads = elect_lane();
        const int cta = cluster_rank();
        ClaimedTiles<Config> tiles(memory, arguments);
#pragma unroll 1
        for (TilePlace place; tiles.next(place, leads);) {
            if (leads)
                bulk_wait_read<0>();  // all buffers are free
            __syncwarp();
            if constexpr (Config::kCollective == Collective::kAllGather)
                store(place, cta, leads);
            else
                send_or_collect(place, cta, leads);
        }
        if (leads)
            bulk_wait();
    }

private:
    // Stores a part of a tile into the result.
    __device__ __forceinline__ void store(const TilePlace& place, int cta, bool leads) const {
        const int example = place.example * arguments.shape.ranks + place.rank;
        forward(leads, [&](int panel) { store_panel(place, example, cta, panel, panel); });
    }

    __device__ __forceinline__ void send_or_collect(const TilePlace& place, int cta, bool leads) const {
        const int64_t part = (int64_t{place.number} * kClusterCtas + cta) * Config::kConsumers + consumer;
        wait_for_addresses();
        if (place.rank == arguments.shape.rank)
            collect(part, place, cta, leads);
        else
            send(part, place.rank, leads);
    }

    // Calls put(panel) for each panel that the consumer fills, which copies it elsewhere.
    template <typename Put> __device__ __forceinline__ void forward(bool leads, Put put) const {
        named_barrier_arrive(buffer_free<Config>(consumer, 0), kHandOverThreads);
#pragma unroll 1
        for (int panel = 0; panel < kPanels; ++panel) {
            const int next = panel + Config::kBuffers;  // in the same buffer
            named_barrier_sync(buffer_filled<Config>(consumer, panel), kHandOverThreads);
            if (leads) {
                put(panel);
                bulk_commit();
                if (next < kPanels)
                    bulk_wait_read<0>();
            }
            __syncwarp();
            if (next < kPanels)
                named_barrier_arrive(buffer_free<Config>(consumer, next), kHandOverThreads);
        }
    }

    // Stores the panel of a buffer into the result.
    __device__ __forceinline__ void store_panel(const TilePlace& place, int example, int cta, int panel,
                                                int item) const {
        const int row = place.row + cta * kTileRows + consumer * 64;
        tma_store(maps.y, {place.column + panel * kPanelColumns, 0, row, example}, memory.buffer(consumer, item));
    }

    __device__ __forceinline__ int64_t parts_of_rank() const {
        return arguments.layout.num_flags / (arguments.shape.ranks - 1);
    }

    // Return the flag and the tile of a part from a source, counted without the rank that receives.
    __device__ __forceinline__ uint32_t* flag(char* received, int source, int64_t part) const {
        return reinterpret_cast<uint32_t*>(received + arguments.layout.flags) + source * parts_of_rank() + part;
    }
    __device__ __forceinline__ char* tile(char* received, int source, int64_t part) const {
        return received + arguments.layout.data + (source * parts_of_rank() + part) * (kPanels * Config::kPanelBytes);
    }

    // Stores a part of a tile to another rank, and sets its flag there.
    __device__ __forceinline__ void send(int64_t part, int to, bool leads) const {
        char* const received = arguments.received_by(to);
        const int source = among_others(arguments.shape.rank, to);
        forward(leads, [&](int panel) {
            bulk_store(tile(received, source, part) + panel * Config::kPanelBytes, memory.buffer(consumer, panel),
                       Config::kPanelBytes);
        });
        if (leads) {
            bulk_wait();
            fence_global_for_async();
            store_release(flag(received, source, part), 1);
        }
        __syncwarp();
    }

    // Brings a part of a tile from all other ranks, panel after panel, and stores the sums.
    __device__ __forceinline__ void collect(int64_t part, const TilePlace& place, int cta, bool leads) const {
        const int sources = arguments.shape.ranks - 1, items = kPanels * sources;
        if (leads) {
            for (int source = 0; source < sources; ++source)
                wait_for_flag(arguments, flag(arguments.received, source, part), 1,
                              source + (source >= arguments.shape.rank));
            fence_global_for_async();
            for (int item = 0; item < Config::kBuffers; ++item)
                load(item, part);
        }
        __syncwarp();
#pragma unroll 1
        for (int item = 0; item < items; ++item) {
            named_barrier_sync(buffer_filled<Config>(consumer, item), kHandOverThreads);
            if (leads and item % sources == sources - 1) {
                store_panel(place, place.example, cta, item / sources, item);
                bulk_commit();
            }
            if (leads and item + Config::kBuffers < items) {
                bulk_wait_read<0>();
                load(item + Config::kBuffers, part);
            }
            __syncwarp();
        }
    }

    // Loads the panel of a source: items go through the sources of each panel.
    __device__ __forceinline__ void load(int item, int64_t part) const {
        const int sources = arguments.shape.ranks - 1;
        memory.loaded(consumer, item).arrive_and_expect(Config::kPanelBytes);
        bulk_load(memory.buffer(consumer, item),
                  tile(arguments.received, item % sources, part) + item / sources * Config::kPanelBytes,
                  Config::kPanelBytes, memory.loaded(consumer, item));
    }
};

}  // namespace jaxmagi::overlap
