// Barriers in shared memory, named barriers, the division of registers, and the rounding of pairs.

#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/warpgroup.cuh"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::sm90;

constexpr int kTurns = 1000, kStages = 2;

// A warp fills a ring of numbers, a warpgroup reads them: what each thread sums up. A fresh barrier lets wait(1) pass.
__global__ void stream_numbers(long long* sums) {
    __shared__ int ring[kStages];
    __shared__ uint64_t barriers[2 * kStages];
    const auto full = [&](int stage) { return Mbarrier{shared_address(barriers + stage)}; };
    const auto empty = [&](int stage) { return Mbarrier{shared_address(barriers + kStages + stage)}; };
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            full(stage).init(1);
            empty(stage).init(kWarpgroupThreads);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroupThreads) {
        long long sum = 0;
        for (int turn = 0; turn < kTurns; ++turn) {
            full(turn % kStages).wait(turn / kStages % 2);
            sum += static_cast<long long>(ring[turn % kStages]) * (turn + 1);
            empty(turn % kStages).arrive();
        }
        sums[threadIdx.x] = sum;
    } else if (threadIdx.x == kWarpgroupThreads) {
        for (int turn = 0; turn < kTurns; ++turn) {
            empty(turn % kStages).wait(turn / kStages % 2 ^ 1);
            ring[turn % kStages] = turn * turn;
            full(turn % kStages).arrive();
        }
    }
}

void check_mbarriers(Verdict& verdict) {
    const DeviceArray<long long> sums(std::vector<long long>(kWarpgroupThreads, -1));
    stream_numbers<<<1, kWarpgroupThreads + 32>>>(sums.data());
    long long sum = 0;
    for (long long turn = 0; turn < kTurns; ++turn)
        sum += turn * turn * (turn + 1);
    verdict.compare("mbarriers of a ring", sums.to_host(), std::vector<long long>(kWarpgroupThreads, sum), 0);
}

// Three warpgroups add to one number in turns, after one of them gave registers to the others.
__global__ void __launch_bounds__(4 * kWarpgroupThreads, 1) take_turns(int* order) {
    constexpr int kFirst = 1, kWorkers = 3, kPair = 2 * kWarpgroupThreads;
    __shared__ int count;
    const int worker = static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1;
    if (threadIdx.x == 0)
        count = 0;
    __syncthreads();
    if (worker < 0) {
        warpgroup_reg_dealloc<32>();
        named_barrier_arrive(kFirst, kPair);
        return;
    }
    warpgroup_reg_alloc<160>();
    for (int turn = 0; turn < kTurns; ++turn) {
        named_barrier_sync(kFirst + worker, kPair);
        if (threadIdx.x % kWarpgroupThreads == 0) {
            order[count] = worker;
            ++count;
        }
        if (turn != kTurns - 1 or worker != kWorkers - 1)
            named_barrier_arrive(kFirst + (worker + 1) % kWorkers, kPair);
    }
}

void check_named_barriers(Verdict& verdict) {
    std::vector<int> wanted(3 * kTurns);
    for (size_t i = 0; i < wanted.size(); ++i)
        wanted[i] = static_cast<int>(i % 3);
    const DeviceArray<int> order(std::vector<int>(wanted.size(), -1));
    take_turns<<<1, 4 * kWarpgroupThreads>>>(order.data());
    verdict.compare("named barriers in turns", order.to_host(), wanted, 0);
}

template <typename Element> __global__ void round_pairs(const float2* numbers, uint32_t* packed, float2* unpacked) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    packed[i] = Element::pack(numbers[i].x, numbers[i].y);
    unpacked[i] = Element::unpack(packed[i]);
}

template <typename Element> void check_rounding(Verdict& verdict) {
    constexpr int kCount = 1 << 14;
    std::mt19937 generator(4);
    std::normal_distribution<float> normal;
    std::vector<float2> numbers(kCount);
    std::vector<uint32_t> packed(kCount);
    std::vector<float> unpacked;
    for (int i = 0; i < kCount; ++i) {
        numbers[i] = {std::ldexp(normal(generator), i % 30 - 20), normal(generator)};
        const uint16_t low = Host<Element>::from_float(numbers[i].x), high = Host<Element>::from_float(numbers[i].y);
        packed[i] = low | static_cast<uint32_t>(high) << 16;
        unpacked.insert(unpacked.end(), {Host<Element>::to_float(low), Host<Element>::to_float(high)});
    }
    const DeviceArray<float2> device(numbers), device_unpacked(numbers);
    const DeviceArray<uint32_t> device_packed{std::vector<uint32_t>(kCount)};
    round_pairs<Element><<<kCount / 256, 256>>>(device.data(), device_packed.data(), device_unpacked.data());
    const std::string name = Host<Element>::kName;
    verdict.compare("pairs rounded to " + name, device_packed.to_host(), packed, 0);
    std::vector<float> flat;
    for (const float2& pair : device_unpacked.to_host())
        flat.insert(flat.end(), {pair.x, pair.y});
    verdict.compare("pairs from " + name, flat, unpacked, 0);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    Verdict verdict;
    check_mbarriers(verdict);
    check_named_barriers(verdict);
    check_rounding<BFloat16>(verdict);
    check_rounding<Float16>(verdict);
    return verdict.exit_code();
}
