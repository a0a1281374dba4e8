"""The oracle of the plan op against the dense mask."""

import numpy as np
import pytest

from jaxmagi.masks import AttnMask
from tests.cases import random_bands

from .schedule_reference import make_plan, tighten

Q_LEN, KV_LEN = 75, 90


@pytest.mark.parametrize("tile_rows", [1, 16, 75, 100])
def test_windows_and_costs(rng: np.random.Generator, tile_rows: int) -> None:
    """A window holds every band that has a cell in the tile; blocks of one key count keys, band by band."""
    for count in (1, 4, 20):
        bands = random_bands(rng, Q_LEN, KV_LEN, count)
        plan = make_plan(bands, Q_LEN, KV_LEN, tile_rows, 1)
        dense = [
            AttnMask.from_bands(band[None, :6], q_len=Q_LEN, kv_len=KV_LEN, check=False).to_dense()
            for band in plan.bands
        ]
        assert sorted(plan.tiles[:, 0]) == list(range(-(-Q_LEN // tile_rows)))
        assert (np.diff(plan.tiles[:, 3]) <= 0).all()
        for tile, first, stop, blocks in plan.tiles:
            rows = slice(tile * tile_rows, (tile + 1) * tile_rows)
            keys = [mask[rows].any(axis=0).sum() for mask in dense]
            assert sum(keys[first:stop]) == sum(keys) == blocks


def test_tight_bands_are_the_same_mask(rng: np.random.Generator) -> None:
    bands = random_bands(rng, Q_LEN, KV_LEN, 40)
    for given, tight in zip(bands, tighten(bands, Q_LEN, KV_LEN), strict=True):
        dense, same = (
            AttnMask.from_bands(band[None], q_len=Q_LEN, kv_len=KV_LEN, check=False).to_dense()
            for band in (given, tight)
        )
        np.testing.assert_array_equal(dense, same)
        hull = [(x.min(), x.max() + 1) if x.size else (0, 0) for x in np.nonzero(dense)]
        np.testing.assert_array_equal(tight[:4], np.concatenate(hull))
