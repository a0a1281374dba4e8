"""Groups of ranks, where there are devices for them."""

import pytest

from .groups import Group, require_devices, require_one_host


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Group:
    """The group that the test is parametrised by."""
    require_devices(request.param.size)
    require_one_host(request.param)
    return request.param
