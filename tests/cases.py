"""Cases and tolerances shared by all tests."""

import csv
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmagi.masks import AttnMask

DATA = Path(__file__).parent / "data"

FP32_TOLERANCE = 2e-5  # max abs against fp64, unit-normal inputs
FP64_TOLERANCE = 1e-10  # distributed against single device


@dataclass(frozen=True)
class MaskCase:
    """A public mask with known answers, as slices (q_range, k_range, type)."""

    name: str
    q_ranges: list[list[int]]
    k_ranges: list[list[int]]
    mask_types: list[int]
    q_len: int
    kv_len: int
    area: int
    max_cell_coverage: int
    empty_q_rows: int

    @property
    def overlaps(self) -> bool:
        return self.max_cell_coverage > 1

    def mask(self, length: int) -> AttnMask:
        """The case in the top left corner of a mask of ``length`` queries and keys."""
        lengths = {"q_len": length, "kv_len": length}
        slices = self.q_ranges, self.k_ranges, self.mask_types
        return AttnMask.from_slices(*slices, **lengths, check=not self.overlaps)


def mask_cases() -> list[MaskCase]:
    """The public cases of tests/data/mask_cases.json."""
    names = {"attn_type_map": "mask_types", "total_seqlen_q": "q_len", "total_seqlen_k": "kv_len"}
    cases: list[dict[str, Any]] = json.loads((DATA / "mask_cases.json").read_text())
    return [MaskCase(**{names.get(key, key): value for key, value in case.items()}) for case in cases]


def document_lengths(total: int, seed: int = 42) -> list[int]:
    """Document lengths (tests/data/document_lengths.csv) that sum to ``total``; longest ``total // 4``."""
    rng = np.random.default_rng(seed)
    with (DATA / "document_lengths.csv").open() as file:
        rows = list(csv.DictReader(file))
    bounds = np.array([json.loads(row["range"]) for row in rows])
    counts = np.array([int(row["number"]) for row in rows])
    middles = (np.maximum(bounds[:, 0], 1) + bounds[:, 1]) // 2
    lengths, left = [], total
    while left > 0:
        drawn = int(rng.choice(middles, p=counts / counts.sum()))
        lengths.append(max(1, min(drawn, total // 4, left)))
        left -= lengths[-1]
    return lengths


def random_bands(rng: np.random.Generator, q_len: int, kv_len: int, count: int) -> np.ndarray:
    """``count`` random bands that overlap nowhere: blocks of query rows, each with its keys cut.

    Bands may be empty, single cells, or have limits far outside their ranges; rows may see nothing.
    """
    blocks = np.sort(rng.integers(0, q_len + 1, count + 1))
    ranges = []
    for q0, q1 in itertools.pairwise(blocks):
        cuts = np.sort(rng.integers(0, kv_len + 1, rng.integers(2, 6)))
        ranges.extend((q0, q1, k0, k1) for k0, k1 in itertools.pairwise(cuts))
    chosen = rng.permutation(np.array(ranges))[:count]
    centre = rng.integers(-q_len, kv_len + 1, count)
    width = rng.integers(0, max(2, kv_len // 2), (count, 2))
    low = np.where(rng.random(count) < 0.4, -(2**30), centre - width[:, 0])
    high = np.where(rng.random(count) < 0.4, 2**30, centre + width[:, 1])
    return np.column_stack([chosen, low, high]).astype(np.int32)


TILE_SIZES = (64, 80, 96, 112, 128, 192)  # rows and keys of the kernels' tiles


def _near_tile_edges(rng: np.random.Generator, length: int, count: int) -> np.ndarray:
    """``count`` sorted positions in [0, length]: multiples of a tile's size, or one before or after them."""
    size = rng.choice(TILE_SIZES, count)
    multiple = size * rng.integers(0, length // size + 2)
    return np.sort(np.clip(multiple + rng.integers(-1, 2, count), 0, length))


def tile_edge_bands(rng: np.random.Generator, q_len: int, kv_len: int, count: int) -> np.ndarray:
    """Up to ``count`` random bands that overlap nowhere and end at edges of tiles, or one before or after.

    Keys are cut into columns, and the rows of each column separately, so that bands over the same rows have
    different keys and begin and end at different rows. Some have a single row; some limits hit a corner.
    """
    columns = np.concatenate([[0], _near_tile_edges(rng, kv_len, int(rng.integers(0, 8))), [kv_len]])
    cuts_each = 2 + 2 * count // len(columns)
    ranges = []
    for k0, k1 in itertools.pairwise(columns):
        cuts = _near_tile_edges(rng, q_len, cuts_each)
        cuts = np.unique(np.concatenate([cuts, np.minimum(cuts[::4] + 1, q_len)]))
        ranges.extend((q0, q1, k0, k1) for q0, q1 in itertools.pairwise(cuts))
    chosen = rng.permutation(np.array(ranges, np.int64).reshape(-1, 4))[:count]
    q0, q1, k0, k1 = chosen.T
    corners = np.stack([k0 - q0, k1 - q0, k0 - q1, k1 - q1])
    low, high = np.sort(rng.choice(corners, 2) + rng.integers(-1, 2, (2, len(chosen))), axis=0)
    low = np.where(rng.random(len(chosen)) < 0.5, -(2**30), low)
    high = np.where(rng.random(len(chosen)) < 0.5, 2**30, high)
    return np.column_stack([chosen, low, high]).astype(np.int32)
