"""Programs that test products with a collective: the ranks share one GPU, as kernels that run beside each other."""

from pathlib import Path

import pytest

from .programs import assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu


def test_matmul_reduce_scatter(tmp_path: Path) -> None:
    sources = ["overlap/sm90/reduce_scatter.cu", "common/sm90/tensor_map.cu"]
    assert_all_ok(succeed(build("reduce_scatter_units", sources, tmp_path)))
