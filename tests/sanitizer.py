"""Programs under compute-sanitizer, which are to touch no memory that is not theirs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .gpu_sharing import environment


def check_memory(command: Sequence[str | Path], variables: dict[str, str] | None = None) -> str:
    """What the memory checker and the program say. Fails where there are errors."""
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    assert sanitizer is not None, "compute-sanitizer, a part of CUDA, is not on the PATH"
    check = [sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "1"]
    run = subprocess.run(
        [*check, *command],
        cwd=Path(__file__).parent.parent,
        env=environment() | (variables or {}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert "ERROR SUMMARY: 0 errors" in report, report
    return report


def memcheck(tests: Path) -> str:
    """The same for the tests of a file whose names have ``sanitizer_subset``.

    Each array is an allocation, to see steps beyond its end.
    """
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", "sanitizer_subset", str(tests)]
    return check_memory([*pytest, "-p", "no:cacheprovider"], {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})
