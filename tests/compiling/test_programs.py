"""Programs compile for GPUs on a machine without any, with our custom calls where they should be."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .described import COMPILER, ENVIRONMENT
from .programs import PROGRAMS

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_compiles(name: str) -> None:
    if not COMPILER.is_dir():
        pytest.skip(f"needs XLA's compiler for GPUs in {COMPILER.relative_to(ROOT)}: .ci/run installs it")
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(COMPILER)])}
    command = [sys.executable, "-m", "tests.compiling.programs", name]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    lines = [line.strip() for line in run.stdout.splitlines()]
    calls = [line for line in lines if line.startswith("jaxmagi")]
    others = [line for line in lines if not line.startswith("jaxmagi")]
    assert sorted(others) == sorted(PROGRAMS[name].collectives)
    assert Counter(calls) == PROGRAMS[name].calls
