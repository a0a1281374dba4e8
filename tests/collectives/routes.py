"""Random transfers, and what they do, row by row in numpy."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxmagi import GroupCastSpec

INPUT_ROWS = 24
"""Rows of each rank's input: like all static sizes the same everywhere, to share compilations."""


@dataclass(frozen=True)
class Transfer:
    """A spec, and for each rank and output row where it comes from: (rank, row)."""

    spec: GroupCastSpec
    sources: list[list[tuple[int, int]]]

    @property
    def cp_size(self) -> int:
        return len(self.sources)

    def cast(self, x: np.ndarray) -> np.ndarray:
        """[cp, input_rows, ...] → [cp, output_rows, ...]."""
        out = np.zeros((self.cp_size, self.spec.output_rows, *x.shape[2:]), x.dtype)
        for rank, rows in enumerate(self.sources):
            for row, source in enumerate(rows):
                out[rank, row] = x[source]
        return out

    def contributions(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """(input (rank, row), output (rank, row)), in the order in which they are added up."""
        return [
            (source, (rank, row)) for rank, rows in enumerate(self.sources) for row, source in enumerate(rows)
        ]

    def reduce_sum(self, y: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """[cp, output_rows, ...] → [cp, input_rows, ...], in y's own dtype."""
        out = np.zeros((self.cp_size, self.spec.input_rows, *y.shape[2:]), y.dtype)
        for source, place in self.contributions():
            out[source] += y[place]
        return out if start is None else start + out

    def counts(self) -> np.ndarray:
        """How many contributions each input row gets: [cp, input_rows]."""
        return self.reduce_sum(np.ones((self.cp_size, self.spec.output_rows), np.int64))


def random_transfer(rng: np.random.Generator, cp_size: int, most_rows: int = INPUT_ROWS) -> Transfer:
    """Splits of 0, 1 or more rows to any number of ranks; some ranks have nothing or get nothing."""
    sizes = [_random_split(rng, int(rng.choice([0, 1, most_rows]))) for _ in range(cp_size)]
    deaf = rng.random(cp_size) < 0.2
    targets = [
        [
            [int(d) for d in rng.permutation(cp_size)[: rng.integers(0, cp_size + 1)] if not deaf[d]]
            for _ in own
        ]
        for own in sizes
    ]
    arrivals = [_random_arrivals(rng, sizes, targets, rank) for rank in range(cp_size)]
    spec = GroupCastSpec.from_splits(
        sizes,
        targets,
        [[size for _, size in own] for own in arrivals],
        [[src for src, _ in own] for own in arrivals],
    )
    sources = [_sources(sizes, targets, own, rank) for rank, own in enumerate(arrivals)]
    spec = dataclasses.replace(spec, input_rows=INPUT_ROWS)
    return Transfer(spec.padded(copies=64, output_rows=cp_size * INPUT_ROWS, pair_rows=32), sources)


def _random_split(rng: np.random.Generator, total: int) -> list[int]:
    cuts = np.sort(rng.integers(0, total + 1, rng.integers(1, 6)))
    return [int(size) for size in np.diff(cuts, prepend=0, append=total)]


def _random_arrivals(
    rng: np.random.Generator, sizes: list[list[int]], targets: list[list[list[int]]], rank: int
) -> list[tuple[int, int]]:
    """Output splits (source, size): what each source sends, cut anew and mixed, each source in order."""
    pieces = []
    for src, (own, own_targets) in enumerate(zip(sizes, targets, strict=True)):
        total = sum(size for size, ranks in zip(own, own_targets, strict=True) if rank in ranks)
        pieces.extend((src, size) for size in _random_split(rng, total))
    return [pieces[i] for i in rng.permutation(len(pieces))]


def _sources(
    sizes: list[list[int]], targets: list[list[list[int]]], arrivals: list[tuple[int, int]], rank: int
) -> list[tuple[int, int]]:
    queues = []
    for src, (own, own_targets) in enumerate(zip(sizes, targets, strict=True)):
        ends = np.cumsum(own)
        kept = [
            (src, row)
            for end, size, ranks in zip(ends, own, own_targets, strict=True)
            if rank in ranks
            for row in range(end - size, end)
        ]
        queues.append(iter(kept))
    return [next(queues[src]) for src, size in arrivals for _ in range(size)]
