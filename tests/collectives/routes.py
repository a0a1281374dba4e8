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

    def merge(
        self, y: np.ndarray, lse: np.ndarray, start: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The merge of partial outputs [cp, output_rows, N, D] in fp64, from its definition."""
        out = np.zeros((self.cp_size, self.spec.input_rows, *y.shape[2:]))
        parts = [(source, y[place], lse[place]) for source, place in self.contributions()]
        if start is not None:
            parts.extend((index, start[0][index], start[1][index]) for index in np.ndindex(out.shape[:2]))
        total = np.zeros((*out.shape[:-1], 1))
        for place, part, part_lse in parts:
            share = np.exp(part_lse.astype(np.float64))[:, None]
            total[place] += share
            out[place] += share * np.where(share > 0, part, 0)
        with np.errstate(divide="ignore"):
            return out / np.where(total > 0, total, 1), np.log(total[..., 0])

    def source_numbers(self) -> np.ndarray:
        """int32 [cp, output_rows]: ``rank * input_rows + row`` of what comes to each row, -1 for nothing."""
        numbers = np.full((self.cp_size, self.spec.output_rows), -1, np.int32)
        for own, rows in zip(numbers, self.sources, strict=True):
            own[: len(rows)] = [rank * self.spec.input_rows + row for rank, row in rows]
        return numbers

    def counts(self) -> np.ndarray:
        """The number of contributions to each input row, [cp, input_rows]."""
        return self.reduce_sum(np.ones((self.cp_size, self.spec.output_rows), np.int64))


def random_transfer(
    rng: np.random.Generator,
    cp_size: int,
    most_rows: int = INPUT_ROWS,
    *,
    repeats: bool = False,
    room_for_repeats: bool = False,
) -> Transfer:
    """Splits of 0, 1 or more rows to any number of ranks; some ranks have nothing or get nothing.

    With ``repeats`` a rank may get a row up to three times. The spec has room for that, or is padded to it.
    """
    sizes = [_random_split(rng, int(rng.choice([0, 1, most_rows]))) for _ in range(cp_size)]
    deaf = rng.random(cp_size) < 0.2
    targets = [
        [[d for d in _random_targets(rng, cp_size, repeats) if not deaf[d]] for _ in own] for own in sizes
    ]
    transfer = make_transfer(rng, sizes, targets)
    most = 3 if repeats or room_for_repeats else 1
    spec = dataclasses.replace(transfer.spec, input_rows=INPUT_ROWS)
    spec = spec.padded(copies=64 * most, output_rows=most * cp_size * INPUT_ROWS, pair_rows=32 * most)
    return Transfer(spec, transfer.sources)


def make_transfer(
    rng: np.random.Generator, sizes: list[list[int]], targets: list[list[list[int]]]
) -> Transfer:
    """The splits of each rank to their targets, where they arrive in random order, in other splits."""
    arrivals = [_random_arrivals(rng, sizes, targets, rank) for rank in range(len(sizes))]
    spec = GroupCastSpec.from_splits(
        sizes,
        targets,
        [[size for _, size in own] for own in arrivals],
        [[src for src, _ in own] for own in arrivals],
    )
    return Transfer(spec, [_sources(sizes, targets, own, rank) for rank, own in enumerate(arrivals)])


def full_exchange(size: int, rows: int) -> GroupCastSpec:
    """Every rank sends so many rows to every rank; static sizes do not depend on their number."""
    everyone = [[rank] for rank in range(size)]
    spec = make_transfer(np.random.default_rng(0), [[rows] * size] * size, [everyone] * size).spec
    spec = dataclasses.replace(spec, input_rows=INPUT_ROWS)
    return spec.padded(copies=64, output_rows=size * INPUT_ROWS, pair_rows=INPUT_ROWS)


def _random_targets(rng: np.random.Generator, cp_size: int, repeats: bool) -> list[int]:
    everyone = np.tile(np.arange(cp_size), 3 if repeats else 1)
    return rng.permutation(everyone)[: rng.integers(0, cp_size + 1)].tolist()


def _random_split(rng: np.random.Generator, total: int) -> list[int]:
    cuts = np.sort(rng.integers(0, total + 1, rng.integers(1, 6)))
    return [int(size) for size in np.diff(cuts, prepend=0, append=total)]


def _random_arrivals(
    rng: np.random.Generator, sizes: list[list[int]], targets: list[list[list[int]]], rank: int
) -> list[tuple[int, int]]:
    """Output splits (source, size): the rows of each source in order, in other splits, mixed."""
    pieces = []
    for src, (own, own_targets) in enumerate(zip(sizes, targets, strict=True)):
        total = sum(size * ranks.count(rank) for size, ranks in zip(own, own_targets, strict=True))
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
            for _ in range(ranks.count(rank))
            for row in range(end - size, end)
        ]
        queues.append(iter(kept))
    return [next(queues[src]) for src, size in arrivals for _ in range(size)]
