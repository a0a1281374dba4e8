"""Unit programs, compiled where the tests run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = ROOT / "csrc"
NVCC_FLAGS = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++20", "-O2", "--split-compile=0"]


def succeed(*command: str | Path) -> str:
    """Returns the output of a command; raises AssertionError with it unless the command exits with 0."""
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def build(program: str, sources: list[str], folder: Path) -> Path:
    """Compiles a .cu of this folder with these files of csrc/ and returns the program, or skips the test."""
    return _compile("nvcc", NVCC_FLAGS, [HERE / f"{program}.cu", *_in_csrc(sources)], folder)


def build_for_host(program: str, sources: list[str], folder: Path) -> Path:
    """Compiles a .cc of this folder without CUDA, and otherwise does what `build` does."""
    return _compile("c++", ["-std=c++20", "-O1"], [HERE / f"{program}.cc", *_in_csrc(sources)], folder)


def _in_csrc(sources: list[str]) -> list[Path]:
    return [SOURCES / source for source in sources]


def _compile(compiler: str, flags: list[str], files: list[Path], folder: Path) -> Path:
    if shutil.which(compiler) is None or not SOURCES.exists():
        pytest.skip(f"{compiler} or {SOURCES} is missing")
    succeed(sys.executable, SOURCES / "common" / "sm90" / "generate_wgmma.py", folder / "wgmma_shapes.inc")
    succeed(compiler, *flags, f"-I{ROOT}", f"-I{folder}", *files, "-o", folder / "program")
    return folder / "program"


def assert_all_ok(output: str) -> None:
    """Raises AssertionError unless each line of the output is of a check that succeeded."""
    lines = output.splitlines()
    assert lines and all(line.startswith("ok ") for line in lines), output
