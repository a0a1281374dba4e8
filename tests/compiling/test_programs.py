"""Programs compile for GPUs on a machine without any, with our custom calls where they should be."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .described import COMPILER, ENVIRONMENT
from .programs import BACKWARD, CAST, DONE, FORWARD, PROGRAMS

ROOT = Path(__file__).parent.parent.parent


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
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(COMPILER)])}
    command = [sys.executable, "-m", "tests.compiling.programs", name]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    lines = [line.strip() for line in run.stdout.splitlines()]
    calls = [line.split() for line in lines if line.startswith("jaxmagi")]
    others = [line for line in lines if not line.startswith("jaxmagi")]
    assert sorted(others) == sorted(PROGRAMS[name].collectives)
    assert Counter(target for target, *_ in calls) == PROGRAMS[name].calls
    check_asynchronous_casts(calls)
