"""Tests once more, in another process under compute-sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .gpu_sharing import environment


def memcheck(tests: Path) -> str:
    """What the memory checker and pytest say of the tests of a file whose names have ``sanitizer_subset``.

    Each array is an allocation, to see steps beyond its end. Fails where there are any.
    """
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    assert sanitizer is not None, "compute-sanitizer, a part of CUDA, is not on the PATH"
    check = [sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "1"]
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", "sanitizer_subset", str(tests)]
    run = subprocess.run(
        [*check, *pytest, "-p", "no:cacheprovider"],
        cwd=Path(__file__).parent.parent,
        env=environment() | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert "ERROR SUMMARY: 0 errors" in report, report
    return report
