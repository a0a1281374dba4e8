"""The generators of masks make what they say: bands that fit and share no cell."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxmagi.masks import AttnMask

from .cases import random_bands, tile_edge_bands

LENGTHS = [(1, 1), (1, 500), (300, 1), (63, 65), (517, 1000), (4099, 4093), (20_000, 20_000)]


@pytest.mark.parametrize("make", [random_bands, tile_edge_bands])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_bands_are_valid(
    rng: np.random.Generator, make: Callable[..., np.ndarray], q_len: int, kv_len: int
) -> None:
    for count in (1, 2, 17, 300):
        bands = make(rng, q_len, kv_len, count)
        assert bands.shape[0] <= count and bands.shape[1:] == (6,) and bands.dtype == np.int32
        AttnMask.from_bands(bands, q_len=q_len, kv_len=kv_len)


def test_tile_edge_bands_share_rows_and_fill_the_list(rng: np.random.Generator) -> None:
    sizes, seen_twice = [], 0
    for _ in range(20):
        bands = tile_edge_bands(rng, 5000, 5000, 100)
        sizes.append(len(bands))
        q0, q1 = bands[:, 0], bands[:, 1]
        seen_twice += sum((q0 <= row).sum() - (q1 <= row).sum() > 1 for row in range(0, 5000, 100))
    assert np.median(sizes) > 50
    assert seen_twice > 100
