"""Groups of ranks, where there are devices for them."""

import jax
import pytest

from .groups import Group


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Group:
    """The group that the test is parametrised by."""
    require_devices(request.param.size)
    return request.param


def require_devices(count: int) -> None:
    """Skips the test where there are fewer."""
    if count > len(jax.devices()):
        pytest.skip(f"needs {count} devices, and there are {len(jax.devices())}")
