"""Numbers of ranks, where there are devices for them."""

import jax
import pytest

from ..collectives.groups import require_devices


@pytest.fixture
def cp_size(request: pytest.FixtureRequest) -> int:
    """Returns the parameter of the test, which is skipped if there are fewer devices."""
    require_devices(request.param)
    return request.param


@pytest.fixture
def one_process() -> None:
    """Skips the test where ranks are in several processes, each of which sees what its own GPUs do."""
    if jax.process_count() > 1:
        pytest.skip("looks at the GPUs of all ranks from one process")
