// Mbarriers, named barriers with registers moved between warpgroups, and the rounding of pairs, against the host.

#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/warpgroup.cuh"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::sm90;

constexpr int kSteps = 1000, kStages = 2;

// A thread fills a ring of numbers, and each thread of a warpgroup adds them up. On a new barrier wait(1) returns.
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
        for (int step = 0; step < kSteps; ++step) {
            full(step % kStages).wait(step / kStages % 2);
            sum += static_cast<long long>(ring[step % kStages]) * (step + 1);
            empty(step % kStages).arrive();
        }
        sums[threadIdx.x] = sum;
    } else if (threadIdx.x == kWarpgroupThreads) {
        for (int step = 0; step < kSteps; ++step) {
            empty(step % kStages).wait(step / kStages % 2 ^ 1);
            ring[step % kStages] = step * step;
            full(step % kStages).arrive();
        }
    }
}

void check_mbarriers(Verdict& verdict) {
    const DeviceArray<long long> sums(std::vector<long long>(kWarpgroupThreads, -1));
    stream_numbers<<<1, kWarpgroupThreads + 32>>>(sums.data());
    long long sum = 0;
    for (long long step = 0; step < kSteps; ++step)
        sum += step * step * (step + 1);
    verdict.compare("mbarriers of a ring", sums.to_host(), std::vector<long long>(kWarpgroupThreads, sum), 0);
}

// Three warpgroups write to a list in turn, after a fourth one gave them registers.
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
    for (int step = 0; step < kSteps; ++step) {
        named_barrier_sync(kFirst + worker, kPair);
        if (threadIdx.x % kWarpgroupThreads == 0) {
            order[count] = worker;
            ++count;
        }
        if (step != kSteps - 1 or worker != kWorkers - 1)
            named_barrier_arrive(kFirst + (worker + 1) % kWorkers, kPair);
    }
}

void check_named_barriers(Verdict& verdict) {
    std::vector<int> wanted(3 * kSteps);
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
    std::vector<float> numbers(2 * kCount), rounded(2 * kCount);
    std::vector<uint32_t> packed(kCount);
    for (int i = 0; i < 2 * kCount; ++i) {
        numbers[i] = std::ldexp(normal(generator), i % 30 - 20);
        const uint16_t bits = Host<Element>::from_float(numbers[i]);
        packed[i / 2] |= static_cast<uint32_t>(bits) << i % 2 * 16;
        rounded[i] = Host<Element>::to_float(bits);
    }
    const DeviceArray<float> device(numbers), device_rounded(numbers);
    const DeviceArray<uint32_t> device_packed{std::vector<uint32_t>(kCount)};
    round_pairs<Element><<<kCount / 256, 256>>>(reinterpret_cast<const float2*>(device.data()), device_packed.data(),
                                                reinterpret_cast<float2*>(device_rounded.data()));
    const std::string name = Host<Element>::kName;
    verdict.compare("pairs rounded to " + name, device_packed.to_host(), packed, 0);
    verdict.compare("pairs from " + name, device_rounded.to_host(), rounded, 0);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    return run_checks({check_mbarriers, check_named_barriers, check_rounding<BFloat16>, check_rounding<Float16>});
}
