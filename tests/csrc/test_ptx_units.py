"""The wrappers of PTX, each against the host."""

from pathlib import Path

import pytest

from .programs import assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "program", ["wgmma_units", "tma_units", "barrier_units", "softmax_units", "bulk_units"]
)
def test_units(tmp_path: Path, program: str) -> None:
    assert_all_ok(succeed(build(program, ["common/sm90/tensor_map.cu"], tmp_path)))
