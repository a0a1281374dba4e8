// Checks csrc/overlap on one GPU: the kernels of all ranks run beside each other, each on some multiprocessors.
// Products of both collectives are compared with fp64, those of three runs with each other, to the bit, and what nobody
// writes stays NaN.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "csrc/common/sm90/dependent_launch.cuh"
#include "csrc/common/sm90/system_memory.cuh"
#include "csrc/overlap/products.h"

using namespace jaxmagi::overlap;
using jaxmagi::collectives::ProductCounts;

constexpr int kMostRanks = jaxmagi::collectives::kMaxNativeRanks;

namespace {

int failures = 0;

void must(cudaError_t error) {
    if (error == cudaSuccess)
        return;
    std::printf("FAILED %s\n", cudaGetErrorString(error));
    std::exit(1);
}

template <typename T> T* device_array(size_t count) {
    void* data;
    must(cudaMalloc(&data, count * sizeof(T)));
    must(cudaMemset(data, 0xff, count * sizeof(T)));  // NaN
    return static_cast<T*>(data);
}

__device__ float number(uint64_t i, uint32_t seed) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u ^ seed;
    h = (h ^ h >> 15) * 2246822519u;
    h = (h ^ h >> 13) * 3266489917u;
    return static_cast<int>((h ^ h >> 16) % 2001 - 1000) / 577.f;
}

template <typename T> __global__ void fill(T* to, int64_t count, uint32_t seed) {
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256)
        to[i] = T(number(i, seed));
}

// Stands for the exchange of addresses: products begin beside it, and have to wait for what it stores.
__global__ void exchange_late(uint64_t* to, const uint64_t* addresses, uint32_t* failure) {
    jaxmagi::sm90::launch_dependent_grids();
    const uint64_t begin = jaxmagi::sm90::nanoseconds();
    while (jaxmagi::sm90::nanoseconds() - begin < 200'000) {
    }
    to[threadIdx.x] = addresses[threadIdx.x];
    if (threadIdx.x == 0)
        *failure = 0;
}

template <typename T> struct Rank {
    T *x, *w, *y;
    char* received;
    ProductCounts* counts;
    cudaStream_t stream;
};

template <typename T> std::vector<T> to_host(const T* data, int64_t count) {
    std::vector<T> values(count);
    must(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

template <typename T> struct Problem {
    Collective collective;
    ProductShape shape;
    bool transposed_w;
    std::vector<Rank<T>> ranks;
    uint64_t* addresses = device_array<uint64_t>(kMostRanks);

    bool gathers() const { return collective == Collective::kAllGather; }
    int64_t x_size() const {
        return int64_t{shape.examples} * (gathers() ? 1 : shape.ranks) * shape.rows * shape.inner;
    }
    int64_t w_size() const { return int64_t{shape.inner} * shape.columns; }
    int64_t y_size() const {
        return int64_t{shape.examples} * (gathers() ? shape.ranks : 1) * shape.rows * shape.columns;
    }
    ReceivedLayout layout() const { return received_layout(collective, shape); }

    Problem(Collective given_collective, ProductShape given, bool transposed)
        : collective(given_collective), shape(given), transposed_w(transposed) {
        std::vector<char*> received(kMostRanks);
        for (int r = 0; r < shape.ranks; ++r) {
            Rank<T> rank{device_array<T>(x_size()), device_array<T>(w_size()), device_array<T>(y_size()),
                         device_array<char>(layout().bytes), device_array<ProductCounts>(1), nullptr};
            fill<<<264, 256>>>(rank.x, x_size(), 2 * r);
            fill<<<264, 256>>>(rank.w, w_size(), 2 * r + 1);
            must(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
            received[r] = rank.received;
            ranks.push_back(rank);
        }
        must(cudaMemcpy(addresses, received.data(), kMostRanks * sizeof(uint64_t), cudaMemcpyHostToDevice));
        must(cudaDeviceSynchronize());
    }
    ~Problem() {
        for (const Rank<T>& rank : ranks) {
            for (void* data : {static_cast<void*>(rank.x), static_cast<void*>(rank.w), static_cast<void*>(rank.y),
                               static_cast<void*>(rank.received), static_cast<void*>(rank.counts)})
                must(cudaFree(data));
            must(cudaStreamDestroy(rank.stream));
        }
        must(cudaFree(addresses));
    }

    void clear_words() const {
        for (const Rank<T>& rank : ranks) {
            must(cudaMemsetAsync(rank.received + layout().failure, 0, layout().num_words() * sizeof(uint32_t)));
            must(cudaMemsetAsync(rank.received, 0xff, layout().failure + sizeof(uint32_t)));
            must(cudaMemsetAsync(rank.counts, 0, sizeof(ProductCounts)));
        }
        must(cudaDeviceSynchronize());
    }

    void launch() const {
        const OperandType type = std::is_same_v<T, __half> ? OperandType::kF16 : OperandType::kBF16;
        must(preload(collective, type, transposed_w));
        for (int r = 0; r < shape.ranks; ++r) {
            const Rank<T>& rank = ranks[r];
            ProductParams params{.shape = shape,
                                 .type = type,
                                 .x = rank.x,
                                 .w = rank.w,
                                 .transposed_w = transposed_w,
                                 .y = rank.y,
                                 .received = rank.received,
                                 .counts = rank.counts,
                                 .timeout_ns = 5'000'000'000,
                                 .num_sms = 132 / shape.ranks / 2 * 2};
            params.shape.rank = r;
            exchange_late<<<1, kMostRanks, 0, rank.stream>>>(
                reinterpret_cast<uint64_t*>(rank.received), addresses,
                reinterpret_cast<uint32_t*>(rank.received + layout().failure));
            must((gathers() ? all_gather_matmul : matmul_reduce_scatter)(params, rank.stream));
        }
    }

    // Returns the failures that ranks have noticed.
    int failed() const {
        int count = 0;
        for (const Rank<T>& rank : ranks)
            count += to_host(reinterpret_cast<uint32_t*>(rank.received + layout().failure), 1)[0] != 0;
        return count;
    }
};

// Compares some numbers of a rank's result with products in fp64, those of the last rows and columns among them.
template <typename T> int count_wrong(const Problem<T>& problem, int rank, int samples) {
    const ProductShape& s = problem.shape;
    std::vector<std::vector<T>> x, w;
    for (const Rank<T>& r : problem.ranks) {
        x.push_back(to_host(r.x, problem.x_size()));
        w.push_back(to_host(r.w, problem.w_size()));
    }
    const std::vector<T> y = to_host(problem.ranks[rank].y, problem.y_size());
    std::mt19937 random(1);
    const auto index = [&](int size, int last) {
        return random() % 3 ? random() % size : size - 1 - random() % std::min(size, last);
    };
    int wrong = 0;
    for (int i = 0; i < samples; ++i) {
        const int64_t example = random() % s.examples, of_rank = random() % s.ranks;
        const int64_t row = index(s.rows, 130), column = index(s.columns, 260);
        double sum = 0, magnitude = 0;
        const auto add = [&](const std::vector<T>& from, int64_t from_row, const std::vector<T>& weights) {
            for (int64_t k = 0; k < s.inner; ++k) {
                const double a = float(from[from_row * s.inner + k]);
                const double b = float(weights[problem.transposed_w ? column * s.inner + k : k * s.columns + column]);
                sum += a * b;
                magnitude += std::abs(a * b);
            }
        };
        if (problem.gathers())
            add(x[of_rank], example * s.rows + row, w[rank]);
        else
            for (int source = 0; source < s.ranks; ++source)
                add(x[source], (example * s.ranks + rank) * s.rows + row, w[source]);
        const int64_t y_row = (problem.gathers() ? example * s.ranks + of_rank : example) * s.rows + row;
        const double found = float(y[y_row * s.columns + column]);
        // Parts and their sum are rounded to 8 bits (bf16; fp16 has more), a product of gathered rows once.
        const double rounding = std::abs(sum) / 256 + magnitude * (problem.gathers() ? 1e-6 : 1. / 256);
        wrong += not (std::abs(found - sum) <= rounding);
    }
    return wrong;
}

template <typename T> void check(Collective collective, ProductShape shape, bool transposed_w) {
    const Problem<T> problem(collective, shape, transposed_w);
    std::vector<std::vector<T>> first;
    int wrong = 0, differing = 0, failed = 0;
    for (int run = 0; run < 3; ++run) {
        for (const Rank<T>& rank : problem.ranks)
            must(cudaMemset(rank.y, 0xff, problem.y_size() * sizeof(T)));
        problem.clear_words();
        problem.launch();
        must(cudaDeviceSynchronize());
        failed += problem.failed();
        for (int r = 0; r < shape.ranks; ++r) {
            const std::vector<T> y = to_host(problem.ranks[r].y, problem.y_size());
            if (run == 0)
                first.push_back(y);
            else
                differing += std::memcmp(y.data(), first[r].data(), y.size() * sizeof(T)) != 0;
        }
    }
    for (int r = 0; r < shape.ranks; ++r)
        wrong += count_wrong(problem, r, 60);
    const bool is_ok = wrong + differing + failed == 0;
    failures += not is_ok;
    std::printf("%s %s, %s, %d examples, %d ranks, %d x %d x %d%s: %d wrong, %d differ from the first run, %d failed\n",
                is_ok ? "ok" : "FAILED", problem.gathers() ? "all-gather" : "reduce-scatter",
                std::is_same_v<T, __half> ? "fp16" : "bf16", shape.examples, shape.ranks, shape.rows, shape.columns,
                shape.inner, transposed_w ? ", transposed" : "", wrong, differing, failed);
    std::fflush(stdout);
}

// Draws a problem of 2 to 8 ranks with up to 20,000 rows of all ranks, few columns where there are many rows.
ProductShape random_shape(std::mt19937& random) {
    const auto up_to = [&](int most) { return 1 + static_cast<int>(random() % most); };
    const int ranks = 1 + up_to(7), rows = up_to(random() % 4 ? 600 : 20000 / ranks);
    return {.examples = rows < 300 ? up_to(3) : 1,
            .ranks = ranks,
            .rank = 0,
            .rows = rows,
            .columns = 8 * up_to(rows > 1000 ? 40 : 150),
            .inner = 8 * up_to(rows > 1000 ? 30 : 100)};
}

}  // namespace

int main() {
    for (const Collective collective : {Collective::kReduceScatter, Collective::kAllGather}) {
        for (const bool transposed_w : {false, true}) {
            for (const ProductShape& shape : {ProductShape{1, 2, 0, 256, 256, 64},
                                              {1, 2, 0, 1, 8, 8},
                                              {3, 4, 0, 257, 1000, 72},
                                              {1, 8, 0, 130, 256, 1032},
                                              {1, 2, 0, 4096, 2048, 512}})
                check<__nv_bfloat16>(collective, shape, transposed_w);
            check<__half>(collective, {2, 4, 0, 300, 520, 200}, transposed_w);
        }
        std::mt19937 random(7);
        for (int i = 0; i < 300; ++i) {
            const ProductShape shape = random_shape(random);
            i % 4 ? check<__nv_bfloat16>(collective, shape, i % 2) : check<__half>(collective, shape, i % 8 < 4);
        }
    }
    return failures > 0;
}
