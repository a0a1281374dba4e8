"""The time limit, the end, and what has to be set before NCCL is loaded."""

import os
import subprocess
import sys
import types
from typing import Any

import pytest

import jaxmagi
from jaxmagi import CollectiveOptions, _native, collectives
from jaxmagi.collectives import _process


@pytest.mark.usefixtures("time_limit")
def test_time_limit() -> None:
    assert _process.timeout_ms(None) == 300_000
    for seconds, milliseconds in ((2, 2000), (0.001, 1), (0.0015, 2), (1e6, 10**9)):
        collectives.set_timeout(seconds)
        assert _process.timeout_ms(None) == milliseconds


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("seconds", [0, -1.0, 1e-4, 1e7, float("nan"), float("inf"), True, "1"])
def test_no_time_limit(seconds: Any) -> None:
    with pytest.raises(ValueError, match=f"between 0.001 and 1000000 seconds, but it is {seconds!r}"):
        collectives.set_timeout(seconds)
    with pytest.raises(ValueError, match=f"between 0.001 and 1000000 seconds, but it is {seconds!r}"):
        CollectiveOptions(timeout=seconds)
    assert _process.timeout_ms(None) == 300_000


def test_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    compiled = types.SimpleNamespace(finalize_collectives=lambda: calls.append("finalize"))
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", compiled)  # pyright: ignore[reportArgumentType]
    jaxmagi.finalize()
    assert calls == ["finalize"]
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", None)
    jaxmagi.finalize()


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_nccl_launches_in_order_unless_told_otherwise(before: str | None, after: str) -> None:
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if before is not None:
        environment[name] = before
    code = f"import os, jaxmagi; print(os.environ['{name}'])"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == after
