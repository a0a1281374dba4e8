"""The kernels under compute-sanitizer, on one rank: with several, it would have them wait for each other."""

from pathlib import Path

import pytest

from ..sanitizer import memcheck
from .groups import Group
from .test_gpu_patterns import check_patterns

pytestmark = pytest.mark.gpu


def test_sanitizer_subset() -> None:
    check_patterns(Group("native", 1), rounds=3)


def test_memcheck_is_clean() -> None:
    assert "1 passed" in memcheck(Path(__file__))
