"""The parts of the heads into which passes of context attention are cut, which tests choose."""

import pytest

from jaxmagi.planning import _cost


def let_parts_receive(monkeypatch: pytest.MonkeyPatch, least_bytes: int) -> None:
    """Has transfers be cut into parts of which each brings a rank so many bytes at least."""
    for name in ("LEAST_PART_BYTES", "LEAST_PART_BYTES_WITHIN_HOST"):
        monkeypatch.setattr(_cost, name, least_bytes)
