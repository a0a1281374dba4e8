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
TWO_LAYERS = {PLAN: 2, FORWARD: 2, BACKWARD: 2}
# Without halves: two casts, then two casts and a sum. Each stage has a plan of tiles for each pass.
WHOLE_STAGES = {PLAN: 4, FORWARD: 2, BACKWARD: 2, CAST: 2, REDUCE: 1}
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
    "collectives beside an Explicit axis": {CAST: 1},
    "attention, Auto": TWO_LAYERS,
    "attention, Explicit": TWO_LAYERS,
    "attention, more devices than key heads": TWO_LAYERS,
    "context, one stage": {PLAN: 2, FORWARD: 1, BACKWARD: 1, CAST: 1, REDUCE: 1},
    # Rematerialised: the forward pass comes twice, with a transfer for each stage but one.
    "context, three stages, two layers": {PLAN: 9, FORWARD: 6, BACKWARD: 3, CAST: 6, REDUCE: 2, DONE: 8},
    "context beside data, Auto": WHOLE_STAGES,
    "context beside data, Explicit": WHOLE_STAGES | {DONE: 3},
    "context beside data, by arguments": WHOLE_STAGES | {DONE: 3},
    "flax": {PLAN: 4, FORWARD: 2, BACKWARD: 2, CAST: 2, REDUCE: 1, DONE: 3},
}

COLLECTIVES = {
    # The gradients of keys and values, added up over the devices that share them, and whole as these are.
    "attention, more devices than key heads": [
        "1 x all-reduce f32[4194304]",
        "2 x all-gather bf16[2,4096,2,128]",
    ],
    "flax": ["2 x all-reduce bf16[12589056]", "2 x all-reduce bf16[64,32,2048]"],  # gradients of parameters
}
"""Lists what XLA sends beside the transfers of jaxmagi. All other programs send nothing."""


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
    lines = [line.strip() for line in run.stdout.splitlines()]
    calls = [line.split() for line in lines if line.startswith("jaxmagi")]
    others = [line for line in lines if not line.startswith("jaxmagi")]
    assert sorted(others) == sorted(COLLECTIVES.get(name, []))
    assert Counter(target for target, *_ in calls) == EXPECTED[name]
    check_casts_in_halves(calls)
