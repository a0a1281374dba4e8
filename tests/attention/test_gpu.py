"""The local op on a GPU: this version runs there on plain XLA."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE, random_bands

from .helpers import CAPACITY, KV_LEN, Q_LEN, assert_close, make_inputs, run, run_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2 * FP32_TOLERANCE), (jnp.bfloat16, 2e-2)])
def test_random_masks_forward_and_backward(rng: np.random.Generator, dtype: Any, tolerance: float) -> None:
    for count in (1, 5, CAPACITY):
        bands = random_bands(rng, Q_LEN, KV_LEN, count)
        mask = AttnMask.from_bands(bands, q_len=Q_LEN, kv_len=KV_LEN).pad_to(CAPACITY)
        inputs = make_inputs(rng, dtype=dtype)
        assert_close(
            run(inputs, mask, with_sinks=True), run_reference(inputs, mask, with_sinks=True), tolerance
        )


def test_ffi_names_the_platform_it_lacks(rng: np.random.Generator) -> None:
    mask = AttnMask.from_bands(random_bands(rng, Q_LEN, KV_LEN, 3), q_len=Q_LEN, kv_len=KV_LEN)
    with pytest.raises(NotImplementedError, match="platform cuda"):
        run(make_inputs(rng), mask, implementation="ffi")
