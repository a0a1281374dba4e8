"""Programs that compare the wrappers of PTX, and functions of the kernels, with the host."""

from pathlib import Path

import pytest

from .programs import assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("units", ["wgmma", "tma", "barrier", "softmax", "bulk"])
def test_units(tmp_path: Path, units: str) -> None:
    assert_all_ok(succeed(build(f"{units}_units", ["common/sm90/tensor_map.cu"], tmp_path)))
