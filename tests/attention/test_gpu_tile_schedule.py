"""The tile schedule on the GPU equals its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._workloads import shuffled_documents
from jaxmagi import _native
from jaxmagi.attention import _cuda
from jaxmagi.masks import UNBOUNDED
from tests.cases import random_bands

from .schedule_reference import Ints, make_schedule, tighten, transpose

pytestmark = pytest.mark.gpu

DIMS = (128, 128)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if _native.extension("cuda") is None:
        pytest.fail("jaxmagi was built without CUDA")


tile_schedule = jax.jit(_cuda.tile_schedule, static_argnums=(1, 2, 3, 4, 5, 6))


def check(
    bands: Ints, q_len: int, kv_len: int, dims: tuple[int, int] = DIMS, own_len: int | None = None
) -> None:
    """Compares schedules of bands [M, C, 6], twice by rows and four times by keys, with the reference.

    By keys, tiles begin with long bands in two of them.
    """
    extension = _native.extension("cuda")
    assert extension is not None
    given = jnp.asarray(bands, jnp.int32)
    for by_keys, aligns in ((False, False), (True, False), (True, True)):
        own = None if by_keys else own_len
        first, second = (tile_schedule(given, q_len, kv_len, dims, by_keys, own, aligns) for _ in range(2))
        for i, mask in enumerate(bands):
            if by_keys:
                rows, keys = extension.backward_tile(*dims)
                more = _cuda._more_tiles(kv_len, bands.shape[1]) if aligns else 0
                transposed = transpose(tighten(mask, q_len, kv_len))
                want = make_schedule(transposed, kv_len, q_len, keys, rows, more_tiles=more)
            else:
                want = make_schedule(mask, q_len, kv_len, *extension.forward_tile(*dims), own_len=own_len)
            for got in (first, second):
                np.testing.assert_array_equal(got[0][i], want.bands)
                np.testing.assert_array_equal(got[1][i], want.tiles)


@pytest.mark.parametrize("count", [1, 2, 31, 33, 127, 128, 129, 383, 384, 385, 1000, 4096, 4097, 9001])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (127, 300), (129, 128), (5000, 4000), (32768, 32769)])
def test_random_bands(rng: np.random.Generator, q_len: int, kv_len: int, count: int) -> None:
    """Overlapping, unsorted, one in four empty; then sorted, as builders leave them."""
    bands = random_bands(rng, q_len, kv_len, count).astype(np.int64)
    bands[rng.random(count) < 0.25] = 0
    check(bands[None], q_len, kv_len)
    check(bands[np.argsort(bands[:, 0], kind="stable")][None], q_len, kv_len)


@pytest.mark.parametrize("count", [5, 1000])
@pytest.mark.parametrize("own_len", [0, 1, 2000, 3999, 4000])
def test_tiles_that_see_received_keys(rng: np.random.Generator, count: int, own_len: int) -> None:
    check(random_bands(rng, 5000, 4000, count).astype(np.int64)[None], 5000, 4000, own_len=own_len)
    length = 60_000  # more tiles than one CTA schedules
    check(random_bands(rng, length, 4000, count).astype(np.int64)[None], length, 4000, own_len=own_len)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_as_many_tiles_as_one_cta_schedules(rng: np.random.Generator, more: int) -> None:
    extension = _native.extension("cuda")
    assert extension is not None
    length = 384 * extension.forward_tile(*DIMS)[0] + more
    check(random_bands(rng, length, length, 200).astype(np.int64)[None], length, length)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (192, 192), (256, 256)])
def test_tiles_of_other_kernels(rng: np.random.Generator, dims: tuple[int, int]) -> None:
    check(random_bands(rng, 3000, 3000, 50).astype(np.int64)[None], 3000, 3000, dims)


@pytest.mark.parametrize("length", [8192, 40_000, 200_000])
@pytest.mark.parametrize("count", [8, 40])
def test_long_documents(rng: np.random.Generator, count: int, length: int) -> None:
    """Tiles begin with documents, which come in any order. In the second mask none do, for they overlap."""
    bands = np.stack([shuffled_documents(rng, length, count) for _ in range(3)]).astype(np.int64)
    bands[1, :, 2:4] = np.clip(bands[1, :, 2:4] + [-1, 1], 0, length)
    check(bands, length, length)


@pytest.mark.parametrize("count", [3, 300])
def test_masks_of_their_own(rng: np.random.Generator, count: int) -> None:
    check(np.stack([random_bands(rng, 2000, 1500, count) for _ in range(70)]).astype(np.int64), 2000, 1500)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 100), (100, 0), (100000, 0), (0, 0)])
def test_nothing_to_see(q_len: int, kv_len: int) -> None:
    check(np.tile([0, 50, 0, 50, -UNBOUNDED, UNBOUNDED], (1, 5, 1)), q_len, kv_len)
    check(np.zeros((2, 400, 6), np.int64), q_len, kv_len)


@pytest.mark.parametrize("q_len", [100, 100000])
def test_no_bands_at_all(q_len: int) -> None:
    check(np.zeros((1, 0, 6), np.int64), q_len, 50)


def test_any_numbers(rng: np.random.Generator) -> None:
    """Bands are data, and their numbers may be any."""
    bands = rng.integers(-(2**31), 2**31, (2, 500, 6))
    widest = [-(2**31), 2**31 - 1]
    bands[:, ::3, :2], bands[:, ::5, 2:4], bands[:, ::2, 4], bands[:, 1::3, 5] = widest, widest, *widest
    check(bands, 3000, 5000)


def test_hundred_thousand_documents(rng: np.random.Generator) -> None:
    length = 1 << 24
    check(shuffled_documents(rng, length, 100_000)[None].astype(np.int64), length, length)
