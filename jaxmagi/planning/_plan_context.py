"""Builds a plan: assigns tokens to ranks, cuts the mask for them, and makes the transfer between ranks."""

from typing import Literal

import jax
import numpy as np
from jaxtyping import Int32, Integer

from .._checks import is_traced, require_type
from ..masks import AttnMask
from ..masks._validation import host_bands
from ._balance import WeightedBands
from ._capacity import PlanCapacity, bucket, checked_ranks, frozen
from ._compiled import merge, planner
from ._cost import CostModel
from ._layout import make_layout
from ._levels import LevelChoice, OneLevel, fastest, levels_to_try
from ._plan import ContextPlan
from ._tables import pack_groups

type Layout = Literal["balanced", "zigzag", "contiguous"] | Integer[np.ndarray | jax.Array, " T_padded"]
"""The order of tokens over ranks."""


def plan_context(
    mask: AttnMask,
    cp_size: int,
    *,
    chunk_size: int | None = None,
    layout: Layout = "balanced",
    two_levels: LevelChoice = "auto",
    cost: CostModel = CostModel(),  # noqa: B008 (frozen, so safe to share)
    capacity: PlanCapacity | None = None,
) -> ContextPlan:
    """Returns the plan of a mask's attention over ``cp_size`` ranks.

    It is a pure function: every host that calls it gets the same plan, without communication.
    Every rank gets the same number of tokens, and receives exactly the rows of keys that its queries see and
    that it does not own.

    Args:
        mask: a self-attention mask (``q_len == kv_len``) with bands ``[S, 6]``. A batch is folded into one
            sequence with `AttnMask.concatenate`.
        cp_size: the number of ranks, at most 4096. Ranks that get no token are allowed, but only wait.
        chunk_size: for ``layout="balanced"``, the tokens of a chunk, the unit that is assigned to ranks. By
            default the multiple of 128 with 10 to 16 chunks per rank that needs least padding, or a half or a
            quarter of it where areas need that; smaller for short sequences. At most a rank's share of the
            tokens. Smaller chunks help only where areas vary much within a chunk: while areas allow, 8 to 16
            groups of chunks per rank are assigned instead, if a rank's number of chunks has such a divisor,
            and otherwise smaller groups. The time of the search for few rows grows with the square of the
            number of groups per rank; none is made for very many of them (thousands with 8 ranks, hundreds
            with 64).
        layout: ``"balanced"`` assigns chunks so that ranks compute about as much and few rows travel. The
            largest area is at most 1 % above the mean, rising to 6 % with 1024 ranks for masks like packed
            documents, if chunks are small enough for that; 1.3 points more where kernels, which compute whole
            tiles, have more equal work then; and up to 2.5 % where neighbours stay together and that takes
            less time. ``"zigzag"`` cuts the sequence into
            ``2 * cp_size`` chunks and gives rank ``r`` the ``r``-th from either end.
            ``"contiguous"`` gives rank ``r`` the ``r``-th of ``cp_size`` chunks. Or integers ``[T_padded]``,
            the global index of the token at each position (-1 for padding), ranks one after the other: the
            ``token_order`` of another plan, or an order of your own (in runs of consecutive tokens that are
            not too short: each rank's mask is cut at the ends of runs).
        two_levels: whether a row that several ranks of another host need crosses the network once, to one of
            that host's ranks, which sends it on inside the host (see `jaxmagi.ContextPlan.by_host`).
            ``"auto"`` does so where ``cost`` predicts that both passes take at least 1 % less time together,
            and never with one host or where ``cp_size`` is no multiple of ``cost.ranks_per_host``; with a
            plan's ``capacity``, as in that plan. It is part of what is compiled: plans that are to share a
            compilation, or to be stacked, take the ``two_levels`` of one plan.
        cost: the machine, and the attention, that the plan is for.
        capacity: static sizes to build the plan with; by default just enough, rounded up to an eighth of an
            octave. Tables of these sizes take at most 2**32 bytes.

    Raises:
        ValueError: the mask is traced, stacked or not square, another argument is out of range, ``layout`` is
            not a permutation of the tokens and padding, ``two_levels`` is True and ``cp_size`` no multiple of
            ``cost.ranks_per_host``, or ``capacity`` is too small, too large, or for other levels or other
            hosts.
        NotImplementedError: the layout cuts a rank's mask into more than 2**22 pieces.

    A stream of masks under one compilation: ``"auto"`` decides once, and capacities only grow.

    Examples:
        >>> first = plan_context(masks.causal(4096), cp_size=16)
        >>> capacity = first.capacity
        >>> for lengths in ([4096], [3000, 1096], [100] * 40 + [96]):
        ...     plan = plan_context(masks.documents(lengths), cp_size=16, two_levels=first.two_levels)
        ...     capacity = capacity.union(plan.capacity)
        ...     plan = plan.pad_to(capacity)
    """
    bands = merge(mask_bands(mask))
    cp_size = checked_ranks(cp_size)
    require_type(cost, CostModel, "cost")
    levels = levels_to_try(two_levels, capacity, cp_size, cost.ranks_per_host)
    if capacity is not None:
        capacity.check_tables(cp_size)
    token_order = make_layout([WeightedBands(bands, 1)], mask.q_len, cp_size, layout, chunk_size, cost)
    plan = plan_layout(bands, mask.q_len, token_order, cp_size, levels, cost)
    return plan if capacity is None else plan.pad_to(capacity)


def plan_layout(
    bands: Int32[np.ndarray, "S 6"],
    length: int,
    token_order: Int32[np.ndarray, " T_padded"],
    cp_size: int,
    levels: list[bool],
    cost: CostModel,
) -> ContextPlan:
    """Returns the plan of merged bands on a layout of `make_layout`, with the faster of the levels to try."""
    routing = planner().Routing(bands, token_order, cp_size)
    chosen = fastest(OneLevel(routing, token_order.size // cp_size, cost), levels)
    of_ranks, counts = chosen.bands
    plan = ContextPlan(
        token_order=token_order,
        position_ids=np.maximum(token_order, 0),
        bands=pack_groups(of_ranks, counts, bucket(int(counts.max()))),
        transfer=chosen.transfer(),
        length=length,
        cp_size=cp_size,
    )
    return jax.tree.map(frozen, plan)


def mask_bands(mask: AttnMask) -> Int32[np.ndarray, "S 6"]:
    """Returns the bands of a mask; ValueError if it cannot be planned."""
    if not isinstance(mask, AttnMask):
        raise ValueError(f"only an AttnMask can be planned, but got {type(mask).__name__}.")
    if is_traced(mask):
        raise ValueError("planning needs the mask's host data, but the mask is traced: plan outside jit.")
    if mask.bands.ndim != 2:
        raise ValueError(
            f"planning takes a mask with bands [S, 6], but they are {mask.bands.shape}: "
            "fold the batch into one sequence with AttnMask.concatenate, or plan each mask and use "
            "ContextPlan.stack."
        )
    if mask.q_len != mask.kv_len:
        raise ValueError(
            f"planning takes self-attention masks, but q_len={mask.q_len} and kv_len={mask.kv_len} differ: "
            "for cross-attention keep the keys whole on each rank, and call attention inside shard_map."
        )
    return host_bands(mask.bands, mask.q_len, mask.kv_len)
