"""Fixtures of the planner's tests."""

import pytest

from jaxmagi.planning import _cost


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transfers of a few rows be cut into as many parts as large ones are."""
    monkeypatch.setattr(_cost, "LEAST_PART_BYTES", 1)
