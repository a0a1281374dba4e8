"""Programs compile for GPUs on a machine without any, with our custom calls where they should be."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .programs import BACKWARD, CAST, DONE, FORWARD, PROGRAMS

ROOT = Path(__file__).parent.parent.parent
COMPILER = ROOT / "build" / "gpu_compiler"


def check_asynchronous_casts(calls: list[list[str]]) -> None:
    """XLA has left attention between the start and the end of each cast."""
    for i, (target, *number) in enumerate(calls):
        if target == CAST and [DONE, *number] in calls[i:]:
            between = calls[i : calls.index([DONE, *number], i)]
            assert {FORWARD, BACKWARD} & {target for target, *_ in between}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_compiles(name: str) -> None:
    if not COMPILER.is_dir():
        pytest.skip(f"needs XLA's compiler for GPUs in {COMPILER.relative_to(ROOT)}: .ci/run installs it")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(COMPILER)]),
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # which would look for the libraries of a GPU
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # which would run kernels
    }
    command = [sys.executable, "-m", "tests.compiling.programs", name]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    lines = [line.strip() for line in run.stdout.splitlines()]
    calls = [line.split() for line in lines if line.startswith("jaxmagi")]
    others = [line for line in lines if not line.startswith("jaxmagi")]
    assert sorted(others) == sorted(PROGRAMS[name].collectives)
    assert Counter(target for target, *_ in calls) == PROGRAMS[name].calls
    check_asynchronous_casts(calls)
