"""Builds a plan: tokens to ranks, bands to stages, and the transfers between them."""

from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from ..masks import AttnMask
from ..masks._validation import integer, is_traced
from ._capacity import PlanCapacity, frozen, resize_axis
from ._cost import CostModel, predict_seconds
from ._layout import make_layout
from ._merge import merge
from ._plan import ContextPlan
from ._runs import Runs
from ._spec import CopyTable, GroupCastSpec, largest_pair, longest, pack_spec
from ._stages import Shard, key_buffers, local_bands, make_shard, split_remote, stage_area
from ._transfers import transfer_tables

_MAX_AUTO_STAGES = 4

type Layout = Literal["balanced", "zigzag", "contiguous"] | np.ndarray | jax.Array
"""How tokens are dealt to ranks."""


def plan_context(
    mask: AttnMask,
    cp_size: int,
    *,
    chunk_size: int | None = None,
    layout: Layout = "balanced",
    num_stages: int | Literal["auto"] = "auto",
    cost: CostModel = CostModel(),  # noqa: B008 (frozen, so safe to share)
    capacity: PlanCapacity | None = None,
) -> ContextPlan:
    """Plans the attention of a mask over ``cp_size`` ranks.

    A pure function of its arguments: every host that calls it gets the same plan, without communication.
    Every rank gets the same number of tokens, and receives exactly the rows of keys that its queries see and
    that it does not own.

    Args:
        mask: a self-attention mask (``q_len == kv_len``) with bands ``[S, 6]``. A batch is folded into one
            sequence with `AttnMask.concatenate`.
        cp_size: the number of ranks.
        chunk_size: for ``layout="balanced"``, the tokens of a chunk, the unit that is dealt to ranks. By
            default the multiple of 128 with 10 to 16 chunks per rank that needs least padding; smaller for
            short sequences. At most a rank's share of the tokens. Smaller chunks help only where areas vary
            much within a chunk: while areas allow, 8 to 16 groups of chunks per rank are dealt instead, if a
            rank's number of chunks has such a divisor. The time of the search for few rows grows with the
            square of the number of chunks or groups per rank. None is made for very many of them: thousands
            with 8 ranks, hundreds with 64.
        layout: ``"balanced"`` deals chunks so that the areas of ranks differ little and few rows travel: the
            largest area is at most 1 % above the mean (4.7 % with many ranks and masks like packed documents)
            if chunks are small enough for that. ``"zigzag"``
            cuts the sequence into ``2 * cp_size`` chunks and gives rank ``r`` the ``r``-th from either end.
            ``"contiguous"`` gives rank ``r`` the ``r``-th of ``cp_size`` chunks. Or integers ``[T_padded]``,
            the global index of the token at each position (-1 for padding), ranks one after the other: the
            ``token_order`` of another plan, or an order of your own (in runs of consecutive tokens that are
            not too short: each rank's mask is cut at the ends of runs).
        num_stages: attention calls of a rank (see `jaxmagi.ContextPlan`). ``"auto"`` takes the number from 1
            to 4 with the smallest time that ``cost`` predicts, the smaller one of equals. The number is part
            of what is compiled: give it as an integer for plans that are to share a compilation.
        cost: the machine that ``"auto"`` is for.
        capacity: static sizes to build the plan with; by default just enough, rounded up to an eighth of an
            octave. Needs an integer ``num_stages``.

    Raises:
        ValueError: the mask is traced, stacked or not square, another argument is out of range, ``layout`` is
            not a permutation of the tokens and padding, or ``capacity`` is too small.
        NotImplementedError: the layout cuts a rank's mask into more than 2**22 pieces.
    """
    bands = merge(_mask_bands(mask))
    cp_size = integer(cp_size, "cp_size", minimum=1)
    counts = _stage_counts(num_stages, capacity)
    _require_type(cost, CostModel, "cost")
    token_order = make_layout(bands, mask.q_len, cp_size, layout, chunk_size)
    shards = [make_shard(bands, tokens) for tokens in token_order.reshape(cp_size, -1)]
    draft = _choose_draft(shards, counts, token_order.size // cp_size, cost)
    local = [
        [local_bands(shard, keys) for keys in stages]
        for shard, stages in zip(shards, draft.keys, strict=True)
    ]
    needed = _needed_capacity(local, draft, cp_size)
    if capacity is None:
        capacity = needed.bucketed()
    capacity.require(needed)
    plan = ContextPlan(
        token_order=token_order,
        position_ids=np.maximum(token_order, 0),
        bands=_pack_bands(local, capacity.bands),
        transfers=tuple(_pack_transfer(draft, i, capacity) for i in range(len(draft.tables))),
        length=mask.q_len,
        cp_size=cp_size,
        num_stages=len(draft.keys[0]),
    )
    return jax.tree.map(frozen, plan)


class _Draft(NamedTuple):
    """A choice of the number of stages: the key buffers ``[cp][num_stages]`` and each transfer's tables."""

    keys: list[list[Runs]]
    tables: list[tuple[CopyTable, CopyTable]]
    output_rows: int
    shard_length: int


def _mask_bands(mask: AttnMask) -> np.ndarray:
    """The bands of a mask that can be planned."""
    if not isinstance(mask, AttnMask):
        raise ValueError(f"plan_context takes an AttnMask, but got {type(mask).__name__}.")
    if is_traced(mask):
        raise ValueError("plan_context needs the mask's host data, but the mask is traced: plan outside jit.")
    if mask.bands.ndim != 2:
        raise ValueError(
            f"plan_context takes one mask with bands [S, 6], but they are {mask.bands.shape}: "
            "fold the batch into one sequence with AttnMask.concatenate, or plan each mask and use "
            "ContextPlan.stack."
        )
    if mask.q_len != mask.kv_len:
        raise ValueError(
            f"plan_context takes self-attention masks, but q_len={mask.q_len} and "
            f"kv_len={mask.kv_len} differ."
        )
    return np.asarray(mask.bands)


def _require_type(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, but it is {value!r}.")


def _stage_counts(num_stages: int | str, capacity: PlanCapacity | None) -> list[int]:
    """The numbers of stages to choose from."""
    if capacity is not None:
        _require_type(capacity, PlanCapacity, "capacity")
    if num_stages != "auto":
        return [integer(num_stages, 'num_stages (if not "auto")', minimum=1)]
    if capacity is not None:
        raise ValueError(
            'capacity is for plans that share a compilation, but num_stages="auto" would compile one program '
            "for each number of stages that it takes: give num_stages as an integer."
        )
    return list(range(1, _MAX_AUTO_STAGES + 1))


def _choose_draft(shards: list[Shard], counts: list[int], shard_length: int, cost: CostModel) -> _Draft:
    """The draft with the smallest predicted time; the first of equals."""
    drafts = [_draft(shards, count, shard_length) for count in counts]
    if len(drafts) == 1:
        return drafts[0]
    return min(drafts, key=lambda draft: _predict(shards, draft, cost))


def _draft(shards: list[Shard], num_stages: int, shard_length: int) -> _Draft:
    parts = [split_remote(shard, max(1, num_stages - 1)) for shard in shards]
    owned = [shard.rows for shard in shards]
    return _Draft(
        keys=[
            key_buffers(shard, own, num_stages, shard_length)
            for shard, own in zip(shards, parts, strict=True)
        ],
        tables=[transfer_tables(owned, list(received)) for received in zip(*parts, strict=True)],
        output_rows=max(part.rows for own in parts for part in own),
        shard_length=shard_length,
    )


def _predict(shards: list[Shard], draft: _Draft, cost: CostModel) -> float:
    area = np.array(
        [[stage_area(shard, keys) for keys in own] for shard, own in zip(shards, draft.keys, strict=True)]
    )
    sent, received = (
        np.stack([_rows(tables[side], len(shards)) for tables in draft.tables], axis=1) for side in (0, 1)
    )
    return predict_seconds(area, sent, received, draft.shard_length, cost)


def _rows(table: CopyTable, cp_size: int) -> np.ndarray:
    """Rows of each rank in a table."""
    rows = np.zeros(cp_size, np.int64)
    np.add.at(rows, table.rank, table.length)
    return rows


def _needed_capacity(local: list[list[np.ndarray]], draft: _Draft, cp_size: int) -> PlanCapacity:
    return PlanCapacity(
        bands=max(len(bands) for stages in local for bands in stages),
        copies=max(longest(table, cp_size) for tables in draft.tables for table in tables),
        pair_rows=max(largest_pair(sends) for sends, _ in draft.tables),
        output_rows=draft.output_rows,
    )


def _pack_bands(local: list[list[np.ndarray]], capacity: int) -> np.ndarray:
    return np.stack([np.stack([resize_axis(bands, capacity, 0) for bands in stages]) for stages in local])


def _pack_transfer(draft: _Draft, index: int, capacity: PlanCapacity) -> GroupCastSpec:
    sends, receives = draft.tables[index]
    return pack_spec(
        sends,
        receives,
        cp_size=len(draft.keys),
        copies=capacity.copies,
        input_rows=draft.shard_length,
        output_rows=capacity.output_rows,
        pair_rows=capacity.pair_rows,
    )
