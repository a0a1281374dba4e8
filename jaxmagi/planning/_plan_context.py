"""Builds the plan of a mask, or those of the masks of layers, which share a layout."""

from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Int32, Integer

from .._checks import as_list, integer, is_traced, list_of, require_type
from .._native import planner
from ..masks import AttnMask
from ..masks._validation import host_bands
from ..masks.geometry import area
from ._capacity import PlanCapacity, bucket, frozen
from ._cost import CostModel
from ._layout import WeightedBands, make_layout
from ._levels import LevelChoice, OneLevel, fastest, levels_to_try
from ._plan import ContextPlan

_MAX_RANKS = 4096  # tables have an entry for about every pair of ranks that exchange rows
_MOST_CELLS = 2**62

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
    bands = _merged_bands(mask)
    cp_size = integer(cp_size, "cp_size", minimum=1, maximum=_MAX_RANKS)
    require_type(cost, CostModel, "cost")
    levels = levels_to_try(two_levels, capacity, cp_size, cost.ranks_per_host)
    if capacity is not None:
        capacity.check_tables(cp_size)
    token_order = make_layout([WeightedBands(bands, 1)], mask.q_len, cp_size, layout, chunk_size, cost)
    plan = _plan_layout(bands, mask.q_len, token_order, cp_size, levels, cost)
    return plan if capacity is None else plan.pad_to(capacity)


def plan_contexts(
    masks: Sequence[AttnMask],
    cp_size: int,
    *,
    weights: Sequence[int] | None = None,
    chunk_size: int | None = None,
    two_levels: LevelChoice | list[bool] = "auto",
    cost: CostModel = CostModel(),  # noqa: B008 (frozen, so safe to share)
) -> tuple[ContextPlan, ...]:
    """Returns plans of several masks on one layout, for models whose layers have different masks.

    Tokens stay where they are from layer to layer, so all layers share a layout. It is made like
    ``layout="balanced"`` of `jaxmagi.plan_context`, but for the sum of the masks' areas by weight. The areas
    of a single mask may differ more between ranks.

    Args:
        masks: the masks of the layers, for one sequence, each as for `jaxmagi.plan_context`.
        cp_size: the number of ranks, at most 4096.
        weights: how many layers have each mask; by default one.
        chunk_size: see `jaxmagi.plan_context`.
        two_levels: see `jaxmagi.plan_context`; a list has one for each mask. ``"auto"`` may choose otherwise
            for each mask and each sequence: for a stream of sequences under one compilation, give
            ``[plan.two_levels for plan in plans]`` of the plans of the first sequence.
        cost: see `jaxmagi.plan_context`.

    Returns:
        A plan for each mask, all with the same ``token_order``.

    Raises:
        ValueError: there is no mask, they differ in length, the weights are not as many integers above zero
            or are so large that areas leave 64 bits, ``two_levels`` is a list with another number of entries
            than masks, or for what `jaxmagi.plan_context` refuses.
        NotImplementedError: see `jaxmagi.plan_context`.

    Examples:
        >>> full, window = plan_contexts(
        ...     [masks.causal(4096), masks.sliding_window(4096, 511)], cp_size=4, weights=[1, 5]
        ... )
        >>> bool((full.token_order == window.token_order).all())
        True
    """
    masks = list_of(masks, AttnMask, "masks")
    layers = _weighted_masks(masks, weights)
    cp_size = integer(cp_size, "cp_size", minimum=1, maximum=_MAX_RANKS)
    require_type(cost, CostModel, "cost")
    choices = two_levels if isinstance(two_levels, list) else [two_levels] * len(masks)
    if len(choices) != len(masks):
        raise ValueError(f"plan_contexts got two_levels={two_levels} for {len(masks)} masks.")
    levels = [levels_to_try(choice, None, cp_size, cost.ranks_per_host) for choice in choices]
    length = masks[0].q_len
    token_order = make_layout(layers, length, cp_size, "balanced", chunk_size, cost)
    return tuple(
        _plan_layout(layer.bands, length, token_order, cp_size, each, cost)
        for layer, each in zip(layers, levels, strict=True)
    )


def _plan_layout(
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
    capacity = bucket(int(counts.max()))
    packed = np.zeros((cp_size, capacity, 6), np.int32)
    packed[np.arange(capacity) < counts[:, None]] = of_ranks
    plan = ContextPlan(
        token_order=token_order,
        position_ids=np.maximum(token_order, 0),
        bands=packed,
        transfer=chosen.transfer(),
        length=length,
        cp_size=cp_size,
    )
    return jax.tree.map(frozen, plan)


def _weighted_masks(masks: list[AttnMask], weights: Sequence[int] | None) -> list[WeightedBands]:
    bands = [_merged_bands(mask) for mask in masks]
    lengths = [mask.q_len for mask in masks]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"plan_contexts takes masks of one length, at least one, but their lengths are {lengths}."
        )
    weights = [1] * len(masks) if weights is None else as_list(weights, "weights")
    if len(weights) != len(masks):
        raise ValueError(f"plan_contexts got {len(weights)} weights for {len(masks)} masks.")
    layers = [
        WeightedBands(table, integer(weight, f"weights[{i}]", minimum=1))
        for i, (table, weight) in enumerate(zip(bands, weights, strict=True))
    ]
    if sum(int(area(layer.bands).sum()) * layer.weight for layer in layers) >= _MOST_CELLS:
        raise ValueError(f"weights={weights} make the masks' areas leave 64 bits: use smaller ones.")
    return layers


def _merged_bands(mask: AttnMask) -> Int32[np.ndarray, "S 6"]:
    """Returns the fewest bands of a mask that `merge` finds; ValueError if it cannot be planned."""
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
    return merge(host_bands(mask.bands, mask.q_len, mask.kv_len))


def merge(bands: Int32[np.ndarray, "S 6"]) -> Int32[np.ndarray, "n 6"]:
    """Returns fewer bands with the same cells (and counts), sorted by ``(q0, k0)``, without empty ones.

    Two bands side by side, or one above the other, become the smallest band around both when that band has
    exactly as many cells as they have together. Bands that cover a cell twice stay as they are. The result is
    tight, and limits that restrict nothing are at `UNBOUNDED`.
    """
    return planner().merge_bands(np.ascontiguousarray(bands, np.int32))
