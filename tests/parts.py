"""The parts of the heads into which passes of context attention are cut, which tests choose."""

import pytest

from jaxmagi.planning import _cost


def let_parts_receive(
    monkeypatch: pytest.MonkeyPatch, least_bytes: int, within_host: int | None = None
) -> None:
    """Has transfers be cut into parts of which each brings a rank so many bytes at least.

    Args:
        within_host: where all ranks are of one host, if it is another number there.
    """
    monkeypatch.setattr(_cost, "LEAST_PART_BYTES", least_bytes)
    monkeypatch.setattr(_cost, "LEAST_PART_BYTES_WITHIN_HOST", within_host or least_bytes)
