"""The kernels of the collectives against the host, also under compute-sanitizer.

Without XLA: compute-sanitizer takes minutes to look at the kernels of NCCL, and would have several ranks wait
for each other.
"""

from pathlib import Path

import pytest

from ..sanitizer import check_memory
from .programs import assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu

KERNELS = ["group_cast", "group_reduce", "pair_rows"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return build("collective_units", [f"collectives/{name}.cu" for name in KERNELS], tmp_path)


def test_units_and_memory(program: Path) -> None:
    assert_all_ok(succeed(program))
    report = check_memory([program]).splitlines()
    assert_all_ok("\n".join(line for line in report if not line.startswith("=")))
