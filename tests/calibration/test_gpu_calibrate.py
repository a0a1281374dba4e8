"""`calibrate` on H100 and H200, between limits that hold for all of them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmagi import CostModel, calibrate

from ..collectives.groups import require_devices

pytestmark = pytest.mark.gpu

DEFAULTS = CostModel()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_speeds_are_plausible(size: int) -> None:
    require_devices(size)
    found = calibrate(Mesh(np.array(jax.devices()[:size]), "ranks"))
    assert 100 < found.backward_tflops < found.tflops < 1000
    assert 1 <= found.partial_tile_cost < 4
    assert 1000 < found.memory_gb_per_second < 5000
    assert 0 < found.latency_us < 200
    if size > 1:
        assert 50 < found.link_gb_per_second < 500
    else:
        assert found.link_gb_per_second == DEFAULTS.link_gb_per_second
    assert found.network_gb_per_second == DEFAULTS.network_gb_per_second
    assert found.ranks_per_host == DEFAULTS.ranks_per_host
