#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "csrc/common/sm90/element.cuh"

// Unit programs share device arrays, 16-bit numbers on the host, and a verdict for each check.

namespace jaxmagi::test {

inline void must(cudaError_t error, const char* what) {
    if (error == cudaSuccess)
        return;
    std::printf("%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}

template <typename T> class DeviceArray {
public:
    explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
        must(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
        must(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "copying to the device");
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data_); }

    T* data() const { return data_; }

    // Waits for everything launched so far and returns the array.
    std::vector<T> to_host() const {
        must(cudaGetLastError(), "launching");
        std::vector<T> values(size_);
        must(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "running");
        return values;
    }

private:
    T* data_ = nullptr;
    size_t size_;
};

// Host conversions between 16-bit numbers and float.
template <typename Element> struct Host;
template <> struct Host<sm90::BFloat16> {
    static constexpr const char* kName = "bf16";
    static float to_float(uint16_t x) { return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{x})); }
    static uint16_t from_float(float x) { return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x; }
};
template <> struct Host<sm90::Float16> {
    static constexpr const char* kName = "f16";
    static float to_float(uint16_t x) { return __half2float(__half(__half_raw{x})); }
    static uint16_t from_float(float x) { return static_cast<__half_raw>(__float2half_rn(x)).x; }
};

template <typename Element> std::vector<uint16_t> random_numbers(size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> numbers(count);
    for (uint16_t& x : numbers)
        x = Host<Element>::from_float(normal(generator));
    return numbers;
}

// Prints a line for each check and remembers whether any failed.
class Verdict {
public:
    template <typename T>
    void compare(const std::string& name, const std::vector<T>& got, const std::vector<T>& want, double tolerance) {
        double largest = got.size() == want.size() ? 0 : INFINITY;
        for (size_t i = 0; i < want.size() and largest < INFINITY; ++i) {
            const double error = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
            largest = error >= 0 ? std::max(largest, error) : INFINITY;  // NaN is neither
        }
        const bool good = largest <= tolerance;
        std::printf("%s %s: error %.3g, at most %.3g\n", good ? "ok  " : "FAIL", name.c_str(), largest, tolerance);
        failed_ |= not good;
    }
    void expect(const std::string& name, bool is_so) {
        std::printf("%s %s\n", is_so ? "ok  " : "FAIL", name.c_str());
        failed_ |= not is_so;
    }
    int exit_code() const { return failed_ ? 1 : 0; }

private:
    bool failed_ = false;
};

// Runs the checks of a program and returns its exit code.
inline int run_checks(std::initializer_list<void (*)(Verdict&)> checks) {
    Verdict verdict;
    for (const auto check : checks)
        check(verdict);
    return verdict.exit_code();
}

}  // namespace jaxmagi::test
