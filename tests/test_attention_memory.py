"""What the benchmark of memory counts, where the device itself counts nothing."""

import json
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import attention_memory
from benchmarks._workloads import Documents, Workload

SMALL = Workload("small", Documents((100, 92), causal=True), 16, 8)
QUERY, KEY, VALUE, COTANGENT = 192 * 64 * 16 * 2, 192 * 8 * 16 * 2, 192 * 8 * 8 * 2, 192 * 64 * 8 * 2


def test_needed_bytes() -> None:
    """By hand, in bfloat16; the gradients are as large as query, key and value."""
    arrays = attention_memory.operands(SMALL)
    row = attention_memory.to_row(SMALL, arrays, compiled=0, peak=0)
    assert row.operands == QUERY + KEY + VALUE + COTANGENT
    assert row.outputs == COTANGENT
    assert row.gradients == QUERY + KEY + VALUE
    assert row.float32_dq == 2 * QUERY
    assert row.needed == row.operands + row.outputs + row.gradients + row.float32_dq


def test_program_has_these_operands_and_results() -> None:
    arrays = attention_memory.operands(SMALL)
    step = attention_memory.compile_step(SMALL, arrays)
    out, gradients = step(*arrays)
    row = attention_memory.to_row(SMALL, arrays, attention_memory.compiled_bytes(step), peak=0)
    sizes = step.memory_analysis()
    assert sizes.argument_size_in_bytes == row.operands
    assert out.nbytes == row.outputs
    assert sum(x.nbytes for x in gradients) == row.gradients
    assert row.compiled >= row.operands + row.outputs + row.gradients


@pytest.mark.parametrize(("excess", "met"), [(0.04, True), (0.06, False)])
def test_requirement(excess: float, met: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = attention_memory.operands(SMALL)
    needed = attention_memory.to_row(SMALL, arrays, 0, 0).needed
    row = attention_memory.to_row(SMALL, arrays, 0, int(needed * (1 + excess)))
    assert row.met == met and row.ratio == pytest.approx(1 + excess, abs=1e-3)
    attention_memory.show(row)
    assert ("met" if met else "missed") in capsys.readouterr().out


def test_peak_of_making_the_operands_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_memory, "peak_bytes", lambda: 7)
    with pytest.raises(RuntimeError, match="the peak of 7 bytes is that of making the operands"):
        attention_memory.measure(SMALL)


def test_devices_that_count_nothing() -> None:
    assert jax.default_backend() == "cpu"
    with pytest.raises(RuntimeError, match="does not count its memory"):
        attention_memory.peak_bytes()


def test_saved_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peaks = iter([1, 10**9])
    monkeypatch.setattr(attention_memory, "peak_bytes", lambda: next(peaks))
    monkeypatch.setattr(attention_memory, "LENGTH", 256)
    monkeypatch.setattr(sys, "argv", ["attention_memory.py", "--out", str(tmp_path)])
    attention_memory.main()
    saved = json.loads((tmp_path / "attention_memory_h200.json").read_text())
    assert saved["rows"][0]["peak"] == 10**9 and not saved["rows"][0]["met"]
    assert {"date", "command", "gpu", "driver", "jax"} <= saved["environment"].keys()
