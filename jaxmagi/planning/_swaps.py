"""Swaps chunks between ranks so that ranks receive fewer rows, with a bounded number of steps."""

from typing import NamedTuple

import numpy as np

MOST_CHUNKS = 2048
"""Time and memory of the search grow with the square of the number of chunks; beyond this, none is made."""

_STEPS = 40
_STEPS_PER_DOUBLING = 2
_FIRST_EXPONENT, _LAST_EXPONENT = -2, 12
_MOST_GRANULES = 4


class Demand(NamedTuple):
    """What chunks need, in granules of keys (each chunk is cut into the same number of granules).

    Attributes:
        needs: ``[n, G]``, 1 where a row of the chunk sees a key of the granule.
        rows: ``[G]``, keys of the granule.
        areas: int64 ``[n]``, visible cells of the chunk.
    """

    needs: np.ndarray
    rows: np.ndarray
    areas: np.ndarray


def make_demand(pieces: np.ndarray, owner: np.ndarray, areas: np.ndarray, length: int, chunk: int) -> Demand:
    """The demand of chunks whose tight bands are ``pieces``, with the chunk ``owner`` of each piece.

    All numbers are integers that the floating-point type holds exactly, so that matrix products are exact in
    any order of summation and every host finds the same swaps.
    """
    count = len(areas)
    split = int(np.clip(2**20 // count**2, 1, min(_MOST_GRANULES, chunk)))
    begin = np.arange(count)[:, None] * chunk + np.arange(split) * chunk // split
    edges = np.append(np.minimum(begin.ravel(), length), length)
    steps = np.zeros((count, count * split + 1), np.int32)
    np.add.at(steps, (owner, np.searchsorted(edges, pieces[:, 2], "right") - 1), 1)
    np.add.at(steps, (owner, np.searchsorted(edges[:-1], pieces[:, 3], "left")), -1)
    exact = np.float32 if length < 2**24 else np.float64
    return Demand((np.cumsum(steps, axis=1)[:, :-1] > 0).astype(exact), np.diff(edges).astype(exact), areas)


def reduce_rows(deal: np.ndarray, demand: Demand, limit: int, *, strict: bool) -> np.ndarray:
    """Deals with fewer received rows, reached by swaps of two chunks.

    What falls is the sum over ranks of ``received ** 2 + sent ** 2 + price * (area above the limit)``, so
    that the busiest ranks count most. For the rows sent, other ranks' needs are taken as they were before the
    swap. In a step every rank takes part in at most one swap, the best pairs first. The price doubles every
    other step (annealing from traffic to balance).

    Args:
        deal: int64 ``[cp, n / cp]``, the chunks of each rank.
        demand: what the chunks need.
        limit: the area that ranks should have at most.
        strict: forbid swaps to areas above the limit (for deals that respect it).
    """
    deal = deal.copy()
    unit = _price_unit(deal, demand)
    for step in range(_STEPS):
        exponent = min(_FIRST_EXPONENT + step // _STEPS_PER_DOUBLING, _LAST_EXPONENT)
        gain, over = _swap_gains(deal, demand, limit, unit * 2.0**exponent, strict)
        swaps = _best_disjoint(gain, len(deal))
        for (first, i), (second, j) in swaps:
            deal[first, i], deal[second, j] = deal[second, j], deal[first, i]
        if not swaps and (not over or exponent == _LAST_EXPONENT):
            break
    return deal


class _Traffic(NamedTuple):
    """Who has and needs what, in granules.

    Attributes:
        owned: bool ``[cp, G]``.
        received: rows ``[cp]`` that each rank receives.
        sent: rows ``[n]`` that leave each chunk, in the order of the deal.
    """

    owned: np.ndarray
    received: np.ndarray
    sent: np.ndarray


def _traffic(deal: np.ndarray, demand: Demand) -> _Traffic:
    owned = np.zeros((len(deal), deal.size), bool)
    owned[np.arange(len(deal))[:, None], deal] = True
    owned = np.repeat(owned, len(demand.rows) // deal.size, axis=1)
    wanted = demand.needs[deal].any(axis=1) & ~owned
    sent = (wanted.sum(axis=0) * demand.rows.astype(np.int64)).reshape(deal.size, -1).sum(axis=1)
    return _Traffic(owned, (wanted * demand.rows.astype(np.int64)).sum(axis=1), sent[deal.ravel()])


def _price_unit(deal: np.ndarray, demand: Demand) -> float:
    """The price at which a rank's whole area weighs as much as its tokens and received rows together."""
    tokens = int(demand.rows.sum()) // len(deal)
    received = int(_traffic(deal, demand).received.sum()) // len(deal)
    return (tokens**2 + received**2) * len(deal) / max(1, int(demand.areas.sum()))


def _swap_gains(
    deal: np.ndarray, demand: Demand, limit: int, price: float, strict: bool
) -> tuple[np.ndarray, bool]:
    """By how much each swap lowers the sum, ``[n, n]`` in the deal's order; and if a rank is too large."""
    traffic = _traffic(deal, demand)
    areas, load = _with_rank_sums(demand.areas[deal.ravel()], deal.shape)
    sent, load_sent = _with_rank_sums(traffic.sent, deal.shape)
    areas_after = (load - areas)[:, None] + areas
    sent_after = ((load_sent - sent)[:, None] + sent).astype(np.float64)
    after = _rows_after(deal, demand, traffic.owned).astype(np.float64) ** 2 + sent_after**2
    after += price * np.maximum(areas_after - limit, 0)
    if strict:
        after[areas_after > limit] = np.inf
    received = np.repeat(traffic.received, deal.shape[1]).astype(np.float64)
    before = received**2 + load_sent.astype(np.float64) ** 2 + price * np.maximum(load - limit, 0)
    return (before[:, None] + before) - (after + after.T), bool((load > limit).any())


def _with_rank_sums(values: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The chunks' values and, for each, the sum of its rank's."""
    return values, np.repeat(values.reshape(shape).sum(axis=1), shape[1])


def _rows_after(deal: np.ndarray, demand: Demand, owned: np.ndarray) -> np.ndarray:
    """Rows that the rank of chunk ``a`` receives with ``b`` in its place: ``[n, n]`` in the deal's order.

    Without ``a`` the rank keeps the needs U and owns O. With ``b`` it receives the rows of U outside O, and
    those of needs(b) outside U and O, except the rows of U or needs(b) that are b's own.
    """
    needs, rows = demand.needs, demand.rows
    order, per_rank = deal.ravel(), deal.shape[1]
    count, split = len(order), len(rows) // len(order)
    dealt = needs[order]
    cover = dealt.reshape(*deal.shape, -1).sum(axis=1)
    kept = np.repeat(cover, per_rank, axis=0) > dealt
    outside = np.repeat(~owned, per_rank, axis=0)
    outside.reshape(count, count, split)[np.arange(count), order] = True
    own_needs = needs.reshape(count, count, split)[np.arange(count), np.arange(count)].ravel() > 0
    own = ((kept | own_needs) * rows).reshape(count, count, split).sum(axis=2)[:, order]
    return ((kept & outside) @ rows)[:, None] + (rows * (outside & ~kept)) @ dealt.T - own


def _best_disjoint(gain: np.ndarray, cp_size: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Swaps that gain, best first, no two with a common rank: pairs of (rank, place)."""
    per_rank = len(gain) // cp_size
    by_ranks = gain.reshape(cp_size, per_rank, cp_size, per_rank).swapaxes(1, 2).reshape(cp_size, cp_size, -1)
    best = by_ranks.argmax(axis=2)
    value = np.triu(np.take_along_axis(by_ranks, best[..., None], axis=2)[..., 0], 1)
    swaps = []
    while (largest := value.argmax()) and value.flat[largest] > 0:
        first, second = divmod(int(largest), cp_size)
        i, j = divmod(int(best[first, second]), per_rank)
        swaps.append(((first, i), (second, j)))
        value[[first, second]] = 0
        value[:, [first, second]] = 0
    return swaps
