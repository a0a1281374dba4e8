// Every form of wgmma against a product on the host: A in shared memory or registers, A and B K-major or MN-major,
// operands written by TMA or by ordinary stores.

#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/panel.h"
#include "csrc/common/sm90/tensor_map.h"
#include "csrc/common/sm90/tma.cuh"
#include "csrc/common/sm90/wgmma.cuh"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::sm90;

constexpr int kM = 64, kDepth = 128, kThreads = 128;

enum class Source { kTma, kStores, kRegisters };  // of A; B comes by TMA, or by stores with A

// How A [kM, kDepth] and B [kColumns, kDepth] lie in memory: as named, or transposed (MN-major).
template <typename Element_, int kColumns_, Source kSource_, bool kTransposedA_, bool kTransposedB_> struct Form {
    using Element = Element_;
    static constexpr int kColumns = kColumns_;
    static constexpr Source kSource = kSource_;
    static constexpr bool kTransposedA = kTransposedA_, kTransposedB = kTransposedB_;

    static constexpr int kARows = kTransposedA ? kDepth : kM, kACols = kTransposedA ? kM : kDepth;
    static constexpr int kBRows = kTransposedB ? kDepth : kColumns, kBCols = kTransposedB ? kColumns : kDepth;
    static constexpr int kAPanelBytes = kARows * kPanelRowBytes, kABytes = kAPanelBytes * panels(kACols);
    static constexpr int kBPanelBytes = kBRows * kPanelRowBytes, kBBytes = kBPanelBytes * panels(kBCols);
    static constexpr int kSharedBytes = kABytes + kBBytes + 1024;

    static std::string name() {
        const char* const sources[] = {"shared (TMA)", "shared (stores)", "registers"};
        return std::string("wgmma ") + Host<Element>::kName + " m64n" + std::to_string(kColumns) + "k16, A in " +
               sources[static_cast<int>(kSource)] + (kTransposedA ? " M-major" : " K-major") +
               (kTransposedB ? ", B N-major" : ", B K-major");
    }
};

// Writes panels as TMA does: the 16-byte units of a row change places by the row's number.
__device__ void store_panels(SharedAddress to, const uint16_t* from, int rows, int columns) {
    for (int i = threadIdx.x; i < rows * panels(columns) * kPanelColumns; i += kThreads) {
        const int row = i % rows, column = i / rows, unit = column / 8 % 8 ^ row % 8;
        const SharedAddress panel = to + column / 64 * rows * kPanelRowBytes;
        const SharedAddress at = panel + row * kPanelRowBytes + unit * 16 + column % 8 * 2;
        const uint16_t number = column < columns ? from[row * columns + column] : uint16_t{0};
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(number) : "memory");
    }
    fence_shared_for_async();
}

__device__ void load_panels(SharedAddress to, const CUtensorMap& map, int rows, int columns, Mbarrier arrived) {
    for (int panel = 0; panel * kPanelColumns < columns; ++panel)
        tma_load(to + panel * rows * kPanelRowBytes, map, {panel * kPanelColumns, 0, 0, 0}, arrived);
}

// Returns the offset of the part of an operand for one step.
__device__ constexpr int step_offset(bool transposed, int panel_bytes, int step) {
    return transposed ? step * 16 * kPanelRowBytes : step / 4 * panel_bytes + step % 4 * 32;
}

// Loads the thread's part of columns 16 · step .. 16 · step + 15 of A.
__device__ void load_fragment(uint32_t (&fragment)[4], const uint16_t* a, int step) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 16 * step + 2 * (threadIdx.x % 4);
    for (int i = 0; i < 4; ++i)
        fragment[i] = *reinterpret_cast<const uint32_t*>(a + (row + i % 2 * 8) * kDepth + column + i / 2 * 8);
}

template <typename Form>
__global__ void __launch_bounds__(kThreads) multiply(const __grid_constant__ CUtensorMap map_a,
                                                     const __grid_constant__ CUtensorMap map_b, const uint16_t* a,
                                                     const uint16_t* b, float* d) {
    extern __shared__ char raw[];
    __shared__ uint64_t barrier;
    const SharedAddress shared_a = (shared_address(raw) + 1023) & ~1023u, shared_b = shared_a + Form::kABytes;
    const Mbarrier arrived{shared_address(&barrier)};
    if (threadIdx.x == 0) {
        arrived.init(1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (Form::kSource == Source::kStores) {
        store_panels(shared_a, a, Form::kARows, Form::kACols);
        store_panels(shared_b, b, Form::kBRows, Form::kBCols);
        __syncthreads();
    } else {
        if (threadIdx.x == 0) {
            arrived.arrive_and_expect(Form::kABytes + Form::kBBytes);
            load_panels(shared_a, map_a, Form::kARows, Form::kACols, arrived);
            load_panels(shared_b, map_b, Form::kBRows, Form::kBCols, arrived);
        }
        arrived.wait(0);
    }
    float sums[Form::kColumns / 2];
    for (float& sum : sums)
        sum = NAN;  // the first product does not accumulate
    uint32_t fragments[kDepth / 16][4];
    if constexpr (Form::kSource == Source::kRegisters) {
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step)
            load_fragment(fragments[step], a, step);
    }
    const SwizzledOperand operand_a(shared_a, Form::kAPanelBytes), operand_b(shared_b, Form::kBPanelBytes);
    fence_operand(sums);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
        using Shape = Wgmma<typename Form::Element, Form::kColumns>;
        const Descriptor b_part = operand_b.at(step_offset(Form::kTransposedB, Form::kBPanelBytes, step));
        if constexpr (Form::kSource == Source::kRegisters) {
            Shape::template mma<Form::kTransposedB>(sums, fragments[step], b_part, step != 0);
        } else {
            const Descriptor a_part = operand_a.at(step_offset(Form::kTransposedA, Form::kAPanelBytes, step));
            Shape::template mma<Form::kTransposedA, Form::kTransposedB>(sums, a_part, b_part, step != 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(sums);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < Form::kColumns / 2; ++i)
        d[(row + i / 2 % 2 * 8) * Form::kColumns + i / 4 * 8 + column + i % 2] = sums[i];
}

CUtensorMap make_map(const DeviceArray<uint16_t>& matrix, bool is_bf16, int rows, int columns) {
    const auto type = is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUtensorMap map;
    must(encode_panel_map({matrix.data(), type, 1, rows, 1, 1, columns}, 1, rows, &map), "encode_panel_map");
    return map;
}

template <typename Form>
std::vector<float> product(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
    std::vector<float> d(kM * Form::kColumns);
    for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < Form::kColumns; ++n) {
            double sum = 0;
            for (int k = 0; k < kDepth; ++k) {
                const int at_a = Form::kTransposedA ? k * kM + m : m * kDepth + k;
                const int at_b = Form::kTransposedB ? k * Form::kColumns + n : n * kDepth + k;
                using Numbers = Host<typename Form::Element>;
                sum += static_cast<double>(Numbers::to_float(a[at_a])) * Numbers::to_float(b[at_b]);
            }
            d[m * Form::kColumns + n] = static_cast<float>(sum);
        }
    }
    return d;
}

template <typename Form> void check(Verdict& verdict) {
    using Element = typename Form::Element;
    constexpr bool kIsBf16 = std::is_same_v<Element, BFloat16>;
    const auto a = random_numbers<Element>(kM * kDepth, 1), b = random_numbers<Element>(Form::kColumns * kDepth, 2);
    const DeviceArray<uint16_t> device_a(a), device_b(b);
    const DeviceArray<float> d(std::vector<float>(kM * Form::kColumns, NAN));
    must(cudaFuncSetAttribute(multiply<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize, Form::kSharedBytes),
         "shared memory");
    multiply<Form><<<1, kThreads, Form::kSharedBytes>>>(make_map(device_a, kIsBf16, Form::kARows, Form::kACols),
                                                        make_map(device_b, kIsBf16, Form::kBRows, Form::kBCols),
                                                        device_a.data(), device_b.data(), d.data());
    verdict.compare(Form::name(), d.to_host(), product<Form>(a, b), 1e-4);
}

template <typename Element, int kColumns> void check_forms(Verdict& verdict) {
    check<Form<Element, kColumns, Source::kTma, false, false>>(verdict);
    check<Form<Element, kColumns, Source::kTma, false, true>>(verdict);
    check<Form<Element, kColumns, Source::kTma, true, false>>(verdict);
    check<Form<Element, kColumns, Source::kTma, true, true>>(verdict);
    check<Form<Element, kColumns, Source::kRegisters, false, false>>(verdict);
    check<Form<Element, kColumns, Source::kRegisters, false, true>>(verdict);
}

template <typename Element, int... kColumns> void check_shapes(Verdict& verdict) {
    (check_forms<Element, kColumns>(verdict), ...);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    return run_checks({check_shapes<BFloat16, 16, 64, 80, 96, 112, 128, 144, 176, 192, 256>,
                       check_shapes<Float16, 64, 80, 96, 112, 128, 144, 176, 192, 256>,
                       check<Form<BFloat16, 128, Source::kStores, false, false>>,
                       check<Form<Float16, 80, Source::kStores, true, true>>});
}
