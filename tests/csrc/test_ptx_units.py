"""The wrappers of PTX, each against the host: programs of their own, compiled here by nvcc."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HEADERS = ROOT / "csrc" / "common" / "sm90"
FLAGS = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++20", "-O2", "--split-compile=0"]


def succeed(*command: str | Path) -> str:
    """Runs a command that must exit with 0; its output is the message if it does not."""
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "program", ["wgmma_units", "tma_units", "barrier_units", "softmax_units", "bulk_units"]
)
def test_units(tmp_path: Path, program: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None or not HEADERS.exists():
        pytest.skip(f"nvcc: {nvcc}, sources in {HEADERS}: {HEADERS.exists()}")
    succeed(sys.executable, HEADERS / "generate_wgmma.py", tmp_path / "wgmma_shapes.inc")
    sources = [HERE / f"{program}.cu", HEADERS / "tensor_map.cu"]
    succeed(nvcc, *FLAGS, f"-I{ROOT}", f"-I{tmp_path}", *sources, "-o", tmp_path / program)
    lines = succeed(tmp_path / program).splitlines()
    assert lines and all(line.startswith("ok ") for line in lines)
