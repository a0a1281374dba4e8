"""The memory of one process in the address space of another, without XLA."""

from pathlib import Path

import pytest

from .programs import assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu


def test_units(tmp_path: Path) -> None:
    sources = ["collectives/xla_pool.cc", "collectives/descriptor_mail.cc"]
    assert_all_ok(succeed(build("pool_units", sources, tmp_path)))
