"""A program that tests products with a collective: ranks are kernels that run beside each other on a GPU."""

from pathlib import Path

import pytest

from .programs import SOURCES, assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu


def test_products(tmp_path: Path) -> None:
    overlap = [str(path.relative_to(SOURCES)) for path in (SOURCES / "overlap/sm90").glob("*.cu")]
    assert_all_ok(succeed(build("overlap_units", [*overlap, "common/sm90/tensor_map.cu"], tmp_path)))
