"""Builds a plan: assigns tokens to ranks and bands to stages, and makes the transfers between ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32, Integer

from .._checks import is_traced, require_type
from ..masks import AttnMask
from ..masks._validation import host_bands
from ._balance import WeightedBands
from ._capacity import PlanCapacity, bucket, checked_ranks, frozen
from ._choices import Choices, NumStages, TwoLevels, fastest
from ._compiled import planner
from ._cost import CostModel
from ._layout import make_layout
from ._merge import merge
from ._overlap import OverlapSolver, StagingCandidate
from ._plan import ContextPlan
from ._plan_stages import PlanStages, pad_alike
from ._spec import pack_spec
from ._tables import largest_pair, longest
from ._two_levels import TwoLevelCandidate

type Layout = Literal["balanced", "zigzag", "contiguous"] | Integer[np.ndarray | jax.Array, " T_padded"]
"""The order of tokens over ranks."""


def plan_context(
    mask: AttnMask,
    cp_size: int,
    *,
    chunk_size: int | None = None,
    layout: Layout = "balanced",
    num_stages: NumStages = "auto",
    two_levels: TwoLevels = "auto",
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
        num_stages: attention calls of a rank (see `jaxmagi.ContextPlan`), at most 256. ``"auto"`` takes, for
            the forward and for the backward pass, the number from 1 to 4 with the smallest time that ``cost``
            predicts, the smaller one of equals; with a plan's ``capacity``, the numbers of that plan. They
            are part of what is compiled: plans that are to share a compilation, or to be stacked, take an
            integer, for both passes, a pair of them, or the ``stage_counts`` of one plan. With three or four
            stages each gets the part of the received keys with which the slowest rank is predicted to be done
            first. Predictions have transfers run beside attention, all from the beginning; on GPUs each
            begins with the attention call before the one that needs its rows. Between GPUs of one host 1 is
            faster.
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
            ``cost.ranks_per_host``, or ``capacity`` is too small, too large, for another ``num_stages``,
            other levels or other hosts, or without a ``num_stages`` for ``"auto"``.
        NotImplementedError: the layout cuts a rank's mask into more than 2**22 pieces.

    A stream of masks under one compilation: ``"auto"`` decides once, and capacities only grow.

    Examples:
        >>> first = plan_context(masks.causal(4096), cp_size=16)
        >>> same = {"num_stages": first.stage_counts, "two_levels": first.two_levels}
        >>> capacity = first.capacity
        >>> for lengths in ([4096], [3000, 1096], [100] * 40 + [96]):
        ...     plan = plan_context(masks.documents(lengths), cp_size=16, **same)
        ...     capacity = capacity.union(plan.capacity)
        ...     plan = plan.pad_to(capacity)
    """
    bands = merge(mask_bands(mask))
    cp_size = checked_ranks(cp_size)
    require_type(cost, CostModel, "cost")
    choices = Choices.of(num_stages, two_levels, capacity, cp_size, cost)
    if capacity is not None:
        capacity.check_tables(cp_size, [count for [count] in choices.passes])
    token_order = make_layout([WeightedBands(bands, 1)], mask.q_len, cp_size, layout, chunk_size, cost)
    return plan_layout(bands, mask.q_len, token_order, cp_size, choices, cost, capacity)


def plan_layout(
    bands: Int32[np.ndarray, "S 6"],
    length: int,
    token_order: Int32[np.ndarray, " T_padded"],
    cp_size: int,
    choices: Choices,
    cost: CostModel,
    capacity: PlanCapacity | None = None,
) -> ContextPlan:
    """Returns the plan of merged bands on a layout of `make_layout`."""
    shard_length = token_order.size // cp_size
    solver = OverlapSolver(planner().Routing(bands, token_order, cp_size), shard_length, cost)
    chosen = fastest(solver, choices, shard_length, cost)
    relayed = [candidate for candidate in chosen if isinstance(candidate, TwoLevelCandidate)]
    forward, *backward = map(_pack_two_levels, relayed) if relayed else _pack(chosen, shard_length, capacity)
    plan = ContextPlan(
        token_order=token_order,
        position_ids=np.maximum(token_order, 0),
        bands=forward.bands,
        transfers=forward.transfers,
        length=length,
        cp_size=cp_size,
        num_stages=forward.num_stages,
        backward=backward[0] if backward else None,
    )
    if relayed and capacity is not None:
        plan = plan.pad_to(capacity)
    return jax.tree.map(frozen, plan)


def _pack(
    chosen: Sequence[StagingCandidate], shard_length: int, capacity: PlanCapacity | None
) -> list[PlanStages]:
    """Returns the stages of each pass, with transfers in one step."""
    drafts = [_Draft.of(candidate) for candidate in chosen]
    needed = drafts[0].needed_capacity()
    if len(drafts) > 1:
        needed = replace(needed, backward=drafts[1].needed_capacity())
    capacity = needed.bucketed() if capacity is None else capacity
    capacity.require(needed)
    sizes = (capacity, capacity.backward or capacity)
    return [draft.pack(size, shard_length) for draft, size in zip(drafts, sizes, strict=False)]


def _pack_two_levels(candidate: TwoLevelCandidate) -> PlanStages:
    """Returns the stages of a pass with transfers in two steps, with just enough capacity, rounded up."""
    bands, bands_per_stage = candidate.bands
    packed = _pack_bands(bands, bands_per_stage, bucket(int(bands_per_stage.max())))
    return PlanStages(packed, pad_alike(candidate.transfers()))


def _pack_bands(bands: np.ndarray, bands_per_stage: np.ndarray, capacity: int) -> np.ndarray:
    packed = np.zeros((*bands_per_stage.shape, capacity, 6), np.int32)
    packed[np.arange(capacity) < bands_per_stage[..., None]] = bands
    return packed


class _Draft(NamedTuple):
    """The stages of a pass before their arrays have their static sizes.

    Attributes:
        bands: int32 ``[n, 6]``, local bands of all ranks and stages, one after the other.
        bands_per_stage: int32 ``[cp, num_stages]``.
        tables: sends and receives of each transfer, as `jaxmagi.planning._spec.pack_spec` takes them.
        output_rows: the most rows that a rank receives in one transfer.
    """

    bands: np.ndarray
    bands_per_stage: np.ndarray
    tables: list[tuple[np.ndarray, np.ndarray]]
    output_rows: int

    @classmethod
    def of(cls, candidate: StagingCandidate) -> "_Draft":
        tables = [candidate.staging.transfer_tables(i) for i in range(len(candidate.split.shares))]
        return cls(*candidate.bands, tables=tables, output_rows=candidate.staging.most_received())

    @property
    def cp_size(self) -> int:
        return len(self.bands_per_stage)

    def needed_capacity(self) -> PlanCapacity:
        return PlanCapacity(
            bands=int(self.bands_per_stage.max()),
            copies=max(longest(table, self.cp_size) for tables in self.tables for table in tables),
            pair_rows=max(largest_pair(sends) for sends, _ in self.tables),
            output_rows=self.output_rows,
        )

    def pack(self, capacity: PlanCapacity, shard_length: int) -> PlanStages:
        bands = _pack_bands(self.bands, self.bands_per_stage, capacity.bands)
        transfers = tuple(
            pack_spec(
                sends,
                receives,
                cp_size=self.cp_size,
                copies=capacity.copies,
                input_rows=shard_length,
                output_rows=capacity.output_rows,
                pair_rows=capacity.pair_rows,
            )
            for sends, receives in self.tables
        )
        return PlanStages(bands, transfers)


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
