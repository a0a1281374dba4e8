"""Cases and tolerances shared by all tests."""

import csv
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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


def mask_cases() -> list[MaskCase]:
    """The public cases of tests/data/mask_cases.json."""
    return [
        MaskCase(
            name=case["name"],
            q_ranges=case["q_ranges"],
            k_ranges=case["k_ranges"],
            mask_types=case["attn_type_map"],
            q_len=case["total_seqlen_q"],
            kv_len=case["total_seqlen_k"],
            area=case["area"],
            max_cell_coverage=case["max_cell_coverage"],
            empty_q_rows=case["empty_q_rows"],
        )
        for case in json.loads((DATA / "mask_cases.json").read_text())
    ]


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
