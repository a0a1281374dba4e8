""".ci/check_kernels complains of planted faults and of nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECK = ROOT / ".ci" / "check_kernels"

CLEAN = """
namespace {
template <int kFactor> __global__ void scale(float* x) { x[threadIdx.x] *= kFactor; }
}  // namespace
void launch(float* x) { scale<3><<<1, 32>>>(x); }
"""

# 64 values are alive at a time, and 2048 threads leave 32 registers to each.
SPILLS = """
__global__ void __launch_bounds__(1024, 2) planted(float* x) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
    for (int n = 0; n < 100; ++n)
        for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i * 7 + 1) % 64] + x[n];
    for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = a[i];
}
"""

STACK = """
__global__ void planted(float* x, int n) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[i];
    for (int i = 0; i < n; ++i) a[i * n % 64] += x[i];
    x[0] = a[n];
}
"""

# The accumulator is used while the instruction that writes it is in flight.
SERIALIZES = """
__device__ void mma(float (&d)[4], unsigned long a, unsigned long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__global__ void planted(float* x, unsigned long a, unsigned long b) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    mma(d, a, b);
    d[0] *= 2;
    mma(d, a, b);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] = d[i];
}
"""

WARNS = "__global__ void planted(float* x) { int unused = 3; x[0] = 1; }"

BROKEN = "__global__ void planted(float* x) { x[0] = y; }"


@pytest.fixture(scope="module")
def compiler() -> Path:
    """Returns the script of some build in this tree whose nvcc still exists."""
    for script in ROOT.glob("build/*/nvcc_sm90a"):
        if subprocess.run([script, "--version"], capture_output=True).returncode == 0:
            return script
    pytest.skip("no build with CUDA in this tree")


def run_check(compiler: Path, folder: Path, kernel: str) -> subprocess.CompletedProcess[str]:
    source = folder / "kernel.cu"
    source.write_text(kernel)
    return subprocess.run([sys.executable, CHECK, compiler, source], capture_output=True, text=True)


def test_clean_kernel_passes(compiler: Path, tmp_path: Path) -> None:
    run = run_check(compiler, tmp_path, CLEAN)
    assert run.returncode == 0, run.stderr
    registers, smem, stack, spills, name = run.stdout.splitlines()[-1].split()
    assert int(registers) > 0 and [smem, stack, spills] == ["0"] * 3 and name == "scale<3>"


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (SPILLS, "planted uses local memory"),
        (STACK, "planted uses local memory"),
        (SERIALIZES, "wgmma.mma_async instructions are serialized"),
        (WARNS, 'variable "unused" was declared but never referenced'),
        (BROKEN, 'identifier "y" is undefined'),
    ],
    ids=["spills", "stack", "serializes", "warns", "broken"],
)
def test_planted_kernel_fails(compiler: Path, tmp_path: Path, kernel: str, complaint: str) -> None:
    run = run_check(compiler, tmp_path, kernel)
    assert run.returncode == 1, run.stdout
    assert complaint in run.stderr
