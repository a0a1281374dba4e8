"""Numbers of ranks, where there are devices for them."""

import pytest

from ..collectives.groups import require_devices


@pytest.fixture
def cp_size(request: pytest.FixtureRequest) -> int:
    """Returns the parameter of the test, which is skipped if there are fewer devices."""
    require_devices(request.param)
    return request.param
