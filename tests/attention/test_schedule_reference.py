"""The reference of the tile schedule agrees with the dense mask."""

import numpy as np
import pytest

from jaxmagi.masks import AttnMask
from tests.cases import random_bands

from .schedule_reference import make_schedule, rows_of_tiles

Q_LEN, KV_LEN = 75, 90


@pytest.mark.parametrize("own_len", [0, 30, 89, 90])
def test_tiles_that_see_received_keys(rng: np.random.Generator, own_len: int) -> None:
    """They are behind the others, the cheapest first."""
    bands = random_bands(rng, Q_LEN, KV_LEN, 3)
    tiles = make_schedule(bands, Q_LEN, KV_LEN, 5, 1, own_len).tiles
    dense = AttnMask.from_bands(bands, q_len=Q_LEN, kv_len=KV_LEN, check=False).to_dense()
    sees_received = tiles[:, 0] < 0
    for tile in tiles[:, 0]:
        index = max(tile, ~tile)
        assert (tile < 0) == dense[5 * index : 5 * index + 5, own_len:].any()
    count = (~sees_received).sum()
    assert not sees_received[:count].any()
    assert (np.diff(tiles[:count, 3]) <= 0).all()
    assert (np.diff(tiles[count:, 3]) >= 0).all()


@pytest.mark.parametrize("tile_rows", [1, 16, 75, 100])
def test_windows_and_costs(rng: np.random.Generator, tile_rows: int) -> None:
    """Bands of a tile include all with visible cells there; with blocks of one key its cost is its keys."""
    for count in (1, 4, 20):
        bands = random_bands(rng, Q_LEN, KV_LEN, count)
        schedule = make_schedule(bands, Q_LEN, KV_LEN, tile_rows, 1)
        dense = [
            AttnMask.from_bands(band[None, :6], q_len=Q_LEN, kv_len=KV_LEN, check=False).to_dense()
            for band in schedule.bands
        ]
        assert sorted(schedule.tiles[:, 0]) == list(range(-(-Q_LEN // tile_rows)))
        assert (np.diff(schedule.tiles[:, 3]) <= 0).all()
        for tile, first, stop, blocks, *_ in schedule.tiles:
            rows = slice(tile * tile_rows, (tile + 1) * tile_rows)
            keys = [mask[rows].any(axis=0).sum() for mask in dense]
            assert sum(keys[first:stop]) == sum(keys) == blocks


def test_tiles_begin_with_long_bands(rng: np.random.Generator) -> None:
    """All rows are those of one tile, in order, and no tile goes on where a long document begins."""
    for more_tiles in (0, 1, 3, 9):
        lengths = rng.choice([1, 100, 1023, 1024, 1500, 3000], 12)
        length, ends = int(lengths.sum()), lengths.cumsum()
        bands = np.stack([ends - lengths, ends], 1)
        rows = rows_of_tiles(bands, length, 128, more_tiles)
        assert len(rows) == -(-length // 128) + more_tiles
        used = rows[rows[:, 0] < rows[:, 1]]
        assert used[0, 0] == 0 and used[-1, 1] == length
        assert (used[1:, 0] == used[:-1, 1]).all()
        assert (np.diff(rows, axis=1) <= 128).all()
        starts = (ends - lengths)[(lengths >= 1024) & (ends > lengths)]
        assert set(starts[:more_tiles]) <= set(used[:, 0])
