"""Fixtures of the planner's tests."""

import pytest

from ..parts import let_parts_receive


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transfers of a few rows be cut into as many parts as large ones are."""
    let_parts_receive(monkeypatch, 1)
