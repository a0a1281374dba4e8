"""Groups of ranks, where there are devices for them."""

import pytest

from .groups import Group, require_devices


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Group:
    """The group that the test is parametrised by."""
    require_devices(request.param.size)
    return request.param
