"""Runs the example in a small size, and the README's code blocks, as a user does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SIZES = {"steps": 6, "seq-len": 256, "window": 64, "layers": 2, "width": 32, "heads": 2, "kv-heads": 1}
SMALL = [f"--{name}={value}" for name, value in (SIZES | {"head-dim": 16}).items()]


def test_train_lm_agrees_with_one_device(tmp_path: Path) -> None:
    """Batch, sequence and heads are spread at once. A mesh without a tensor axis is `test_train_curve`'s."""
    mesh = ["--data=2", "--context=2", "--tensor=2"]
    command = [sys.executable, "examples/train_lm.py", *SMALL, *mesh, "--check", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", run.stdout).groups())  # type: ignore[union-attr]
    assert last < first
    assert (tmp_path / "train_lm.png").stat().st_size > 10_000


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(readme_blocks())))
def test_readme_code_runs(index: int) -> None:
    """Each Python block of the README is a program."""
    command = [sys.executable, "-c", readme_blocks()[index]]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
