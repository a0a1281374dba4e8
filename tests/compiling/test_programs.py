"""Programs compile for GPUs on a machine without any, with our custom calls where they should be."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .programs import PROGRAMS

ROOT = Path(__file__).parent.parent.parent
COMPILER = ROOT / "build" / "gpu_compiler"

PLAN, FORWARD, BACKWARD = (f"jaxmagi_attention_{name}" for name in ("plan", "forward", "backward"))
CAST, REDUCE, DONE = "jaxmagi_group_cast_start", "jaxmagi_group_reduce_start", "jaxmagi_group_done"

LOCAL = {PLAN: 2, FORWARD: 1, BACKWARD: 1}
EXPECTED = {
    "attention 64": LOCAL,
    "attention 96, deterministic": LOCAL,
    "attention 128, batch": LOCAL,
    "attention 192 and 128, capped": LOCAL,
    "attention 256": LOCAL,
    "native collectives, Auto": {CAST: 1, REDUCE: 1},
    "native collectives, Explicit": {CAST: 1, REDUCE: 1},
    "collectives by NCCL": {CAST: 1, REDUCE: 1},
    "collectives of hosts with one rank": {CAST: 1, REDUCE: 1},
    "collectives beside an Auto axis": {CAST: 1},
    "context, one stage": {PLAN: 2, FORWARD: 1, BACKWARD: 1, CAST: 1, REDUCE: 1},
    # Rematerialised: the forward pass comes twice, with a transfer for each stage but one.
    "context, three stages, two layers": {PLAN: 9, FORWARD: 6, BACKWARD: 3, CAST: 6, REDUCE: 2, DONE: 8},
    "flax": {PLAN: 4, FORWARD: 2, BACKWARD: 2, CAST: 2, REDUCE: 1, DONE: 3},
}


def test_all_programs_are_expected() -> None:
    assert EXPECTED.keys() == PROGRAMS.keys()


def check_casts_in_halves(calls: list[list[str]]) -> None:
    """XLA has left attention between the start and the end of each."""
    for i, (target, *number) in enumerate(calls):
        if target == CAST and [DONE, *number] in calls[i:]:
            between = calls[i : calls.index([DONE, *number], i)]
            assert {FORWARD, BACKWARD} & {target for target, *_ in between}


@pytest.mark.parametrize("name", EXPECTED)
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
    calls = [line.split() for line in run.stdout.splitlines()]
    assert Counter(target for target, *_ in calls) == EXPECTED[name]
    check_casts_in_halves(calls)
