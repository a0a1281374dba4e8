"""Both passes under public and random masks, and the forward pass under the masks of the benchmarks."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._workloads import MASKS
from tests.cases import MaskCase, mask_cases

from .gpu_harness import Shape, fuzz, make_operands, run_and_check
from .gradient_harness import run_and_check_both

pytestmark = pytest.mark.gpu

LENGTHS = (1024, 4096, 15_360)  # the public masks are padded to these

SHAPES = [
    Shape(1, 1, 4, 4, 64, 64),
    Shape(1, 20_000, 8, 1, dtype=jnp.float16),
    Shape(20_000, 1, 4, 2),
    Shape(65, 63, 4, 4, 256, 256),
    Shape(129, 1000, 8, 1, 96, 96, jnp.float16),
    Shape(300, 517, 8, 2, 192, 128),
    Shape(1000, 999, 4, 2, 64, 64),
    Shape(1025, 2047, 4, 1, dtype=jnp.float16, batch=2),
    Shape(2049, 1023, 4, 2, 192, 192),
    Shape(4099, 4093, 2, 1, 256, 256, jnp.float16),
    Shape(5003, 11_021, 2, 2),
    Shape(19_997, 20_000, 2, 1, 64, 64, jnp.float16),
]


@pytest.mark.parametrize("case", mask_cases(), ids=lambda case: case.name)
def test_public_mask(case: MaskCase) -> None:
    length = next(length for length in LENGTHS if max(case.q_len, case.kv_len) <= length)
    shape = Shape(length, length, 2, 1)
    bands = np.asarray(case.mask(length).pad_to(4096).bands)
    report, _ = run_and_check_both(make_operands(shape, bands), shape)
    assert report.visible == 2 * (case.q_len - case.empty_q_rows)


@pytest.mark.timeout(900)  # the longest shape takes a minute alone, and other tests may share the GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_masks(shape: Shape, rng: np.random.Generator) -> None:
    for index, operands in enumerate(fuzz(rng, shape)):
        try:
            run_and_check_both(operands, shape, deterministic=index % 3 == 0)
        except AssertionError as error:
            error.add_note(f"mask {index} of {shape}")
            raise


@pytest.mark.parametrize("name", MASKS)
def test_benchmark_mask(name: str, rng: np.random.Generator) -> None:
    """Right where its speed is measured; at a sample of rows."""
    mask = MASKS[name]().mask()
    operands = make_operands(Shape(mask.q_len, mask.kv_len, 8, 1), np.asarray(mask.bands))
    run_and_check(operands, rows=rng.choice(mask.q_len, 256, replace=False))
