"""Programs of their own, compiled where the tests run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = ROOT / "csrc"
FLAGS = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++20", "-O2", "--split-compile=0"]


def succeed(*command: str | Path) -> str:
    """Runs a command that must exit with 0; its output is the message if it does not."""
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def build(program: str, sources: list[str], folder: Path) -> Path:
    """Compiles a .cu of this folder with these files of csrc/, or skips the test."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or not SOURCES.exists():
        pytest.skip(f"nvcc: {nvcc}, sources in {SOURCES}: {SOURCES.exists()}")
    succeed(sys.executable, SOURCES / "common" / "sm90" / "generate_wgmma.py", folder / "wgmma_shapes.inc")
    files = [HERE / f"{program}.cu", *(SOURCES / source for source in sources)]
    succeed(nvcc, *FLAGS, f"-I{ROOT}", f"-I{folder}", *files, "-o", folder / program)
    return folder / program


def build_for_host(program: str, sources: list[str], folder: Path) -> Path:
    """Compiles a .cc of this folder with these files of csrc/, without CUDA, or skips the test."""
    compiler = shutil.which("c++")
    if compiler is None or not SOURCES.exists():
        pytest.skip(f"c++: {compiler}, sources in {SOURCES}: {SOURCES.exists()}")
    files = [HERE / f"{program}.cc", *(SOURCES / source for source in sources)]
    succeed(compiler, "-std=c++20", "-O1", f"-I{ROOT}", *files, "-o", folder / program)
    return folder / program


def assert_all_ok(output: str) -> None:
    """Of a program that prints one line for each check."""
    lines = output.splitlines()
    assert lines and all(line.startswith("ok ") for line in lines), output
