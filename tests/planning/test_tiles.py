"""Tiles that need own keys alone, and the others."""

import numpy as np
import pytest

from jaxmagi.masks import geometry
from jaxmagi.masks.geometry import UNBOUNDED
from jaxmagi.planning import CostModel
from jaxmagi.planning._cost import Pass, Tile
from jaxmagi.planning._tiles import Tiles, count_tiles, tiles_of

from ..cases import random_bands

COST = CostModel(num_heads=4, num_kv_heads=4, head_dim=64)  # tiles of 192 x 128, backward of 128 x 128
CAUSAL = [0, 384, 0, 384, -UNBOUNDED, 0]


def tiles_of_rank(bands: list[list[int]], own_keys: int, direction: Pass) -> Tiles:
    return tiles_of(np.array(bands, np.int32), np.array([len(bands)]), own_keys, direction)


def test_tiles_of_queries_that_see_received_keys() -> None:
    """The first 192 of 384 queries see own keys before them, the others also 128 received keys."""
    tiles = tiles_of_rank([CAUSAL, [192, 384, 384, 512, -UNBOUNDED, UNBOUNDED]], 384, COST.forward)
    # The first ones have 2 tiles of up to 192 keys. The others have 3 of up to 384, of which all see 193, and
    # a full one of received keys.
    np.testing.assert_array_equal(tiles.own, [[0, 2]])
    np.testing.assert_array_equal(tiles.others, [[1 + 1, 2]])
    np.testing.assert_array_equal(tiles.halves, [[[1, 2]], [[1, 0]]])
    np.testing.assert_array_equal(tiles.all, [[2, 4]])


def test_tiles_of_received_keys() -> None:
    """Keys of three own tiles are seen by up to 384, 256 and 128 queries, those of one received by 192."""
    tiles = tiles_of_rank([CAUSAL, [192, 384, 384, 512, -UNBOUNDED, UNBOUNDED]], 384, COST.backward)
    np.testing.assert_array_equal(tiles.own, [[2 + 1, 3]])
    np.testing.assert_array_equal(tiles.others, [[1, 1]])
    assert len(tiles.halves) == 0


def test_a_tile_of_own_and_received_keys_is_no_own_one() -> None:
    """The last 44 of 300 own keys are in a tile with received ones, if there are such."""
    bands = [[0, 300, 0, 300, -UNBOUNDED, 0], [0, 1, 300, 301, -UNBOUNDED, UNBOUNDED]]
    # The first tile is seen by up to 300 queries, of which 173 see all, the second one by up to 172, of which
    # 45 do, and the last one by up to 44, and by one through the other band.
    mixed, alone = (tiles_of_rank(some, 300, COST.backward) for some in (bands, bands[:1]))
    np.testing.assert_array_equal([mixed.own[0], mixed.others[0]], [[1, 4], [0, 2]])
    np.testing.assert_array_equal([alone.own[0], alone.others[0]], [[1, 5], [0, 0]])


def test_packed_heads_do_not_shorten_the_tiles_of_the_schedule() -> None:
    """A query sees a received key, so that 192 of 384 wait for it, though tiles hold 24 of them."""
    direction = CostModel().forward
    assert (direction.tile, direction.scheduled) == ((24, 80), 192)
    bands = [[0, 384, 0, 80, -UNBOUNDED, UNBOUNDED], [200, 201, 384, 385, -UNBOUNDED, UNBOUNDED]]
    tiles = tiles_of_rank(bands, 384, direction)
    np.testing.assert_array_equal(tiles.own, [[8, 0]])
    np.testing.assert_array_equal(tiles.others, [[8, 1]])


def test_a_band_without_cells_sees_no_received_keys() -> None:
    """No key is at least 2 and at most 1 behind its query."""
    tiles = tiles_of_rank([CAUSAL, [0, 384, 0, 512, 2, 1]], 384, COST.forward)
    np.testing.assert_array_equal([tiles.own, tiles.others], [[[1, 4]], [[0, 0]]])


def own_bands(bands: np.ndarray, own_keys: int, received: bool, direction: Pass) -> np.ndarray:
    """The bands of a rank in its own tiles, which are found one after the other in the dense mask."""
    dense, size = geometry.to_dense(bands, own_keys, 2 * own_keys) > 0, direction.scheduled
    parts = [np.zeros((0, 6), np.int32)]
    for begin in range(0, own_keys, size):
        end = min(begin + size, own_keys)
        if direction.by_keys and (end - begin == size or not received):
            parts.append(geometry.crop(bands, 0, own_keys, begin, end))
        if not direction.by_keys and not dense[begin:end, own_keys:].any():
            parts.append(geometry.crop(bands, begin, end, 0, own_keys))
    return np.concatenate(parts)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_tiles_of_ranks_with_random_bands(seed: int, by_keys: bool) -> None:
    rng = np.random.default_rng(seed)
    own_keys, size = int(rng.integers(8, 97)), int(rng.integers(1, 5))
    keys = own_keys + int(rng.integers(0, own_keys + 1)) * (seed % 5 > 0)
    ranks = [random_bands(rng, own_keys, keys, count)[:count] for count in rng.integers(1, 8, 5)]
    ranks[seed % 6 : seed % 6 + 1] = [np.zeros((0, 6), np.int32)]
    direction = Pass(Tile(size, 4 * size), by_keys, 4 * size, 1.0, by_keys)

    def count(bands: list[np.ndarray]) -> np.ndarray:
        return count_tiles(np.concatenate(bands), np.array([len(each) for each in bands]), direction)

    tiles = tiles_of(np.concatenate(ranks), np.array([len(each) for each in ranks]), own_keys, direction)
    received = any((bands[:, 3] > own_keys).any() for bands in ranks)
    np.testing.assert_array_equal(tiles.all, count(ranks))
    np.testing.assert_array_equal(
        tiles.own, count([own_bands(bands, own_keys, received, direction) for bands in ranks])
    )
    ends = [] if by_keys else [(0, own_keys), (own_keys, UNBOUNDED)]
    halves = [count([geometry.crop(bands, 0, own_keys, *each) for bands in ranks]) for each in ends]
    if halves:
        halves[0] -= tiles.own
    np.testing.assert_array_equal(tiles.halves, np.reshape(halves, (len(ends), len(ranks), 2)))
