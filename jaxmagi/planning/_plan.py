"""The plan of one mask over a mesh axis, as arrays in a pytree."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int32

from .._checks import is_traced, list_of, require_type
from ._capacity import SAME_LEVELS, SAME_STAGES, PlanCapacity, StageCounts, counts_of_passes, frozen
from ._cost import CostModel
from ._draw import draw_plan
from ._plan_stages import PlanStages
from ._report import PlanReport, report_plan
from ._spec import GroupCastSpec, RelayedSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ContextPlan:
    """How ``cp_size`` ranks share the attention of one mask. Built on the host by `jaxmagi.plan_context`.

    A registered pytree of int32 arrays. Each leads with the rank or with the dispatched tokens in rank order,
    so ``PartitionSpec(axis_name)`` shards the whole plan. Only sizes are static: plans of one `capacity`,
    length, shard length and `ranks_per_host` share a compilation.

    A rank makes ``num_stages`` attention calls with its own queries. With one stage the keys are its own
    shard followed by the rows received in ``transfers[0]``. With more, stage 0 sees its own shard only and
    stage ``s`` sees the rows received in ``transfers[s - 1]`` only. Every row is received at most once, and
    only if a query of the rank sees it.

    Attributes:
        token_order: int32 ``[T_padded]``, the global index of the token at each dispatched position, -1 for
            padding. Itself a valid ``layout`` for `jaxmagi.plan_context`.
        position_ids: int32 ``[T_padded]``, the same with 0 for padding (for rotary embeddings).
        bands: int32 ``[cp, num_stages, C, 6]``, each rank's and stage's mask: row ``q`` of the shard, key
            ``k`` of the stage's key buffer. Unused rows are all zero.
        transfers: one `GroupCastSpec` per transfer of keys and values: ``max(1, num_stages - 1)``; one
            `RelayedSpec` in plans with two levels.
        length: tokens of the sequence, without padding. Static.
        cp_size: number of ranks. Static.
        num_stages: attention calls of a rank in the forward pass. Static.
        backward: bands and transfers of the backward pass if it has stages of its own; None if it takes those
            of the forward pass.
    """

    token_order: Int32[jax.Array | np.ndarray, "*stack T_padded"]
    position_ids: Int32[jax.Array | np.ndarray, "*stack T_padded"]
    bands: Int32[jax.Array | np.ndarray, "*stack cp num_stages C 6"]
    transfers: tuple[GroupCastSpec | RelayedSpec, ...]
    length: int = field(metadata={"static": True})
    cp_size: int = field(metadata={"static": True})
    num_stages: int = field(metadata={"static": True})
    backward: PlanStages | None = None

    @property
    def forward_stages(self) -> PlanStages:
        """The bands and transfers of the forward pass."""
        return PlanStages(self.bands, self.transfers)

    @property
    def backward_stages(self) -> PlanStages:
        """The bands and transfers of the backward pass."""
        return self.forward_stages if self.backward is None else self.backward

    @property
    def stage_counts(self) -> StageCounts:
        """The numbers of stages, as ``num_stages`` of other plans that are to share a compilation."""
        return self.num_stages if self.backward is None else (self.num_stages, self.backward.num_stages)

    @property
    def shard_length(self) -> int:
        """Tokens of each rank, padding included: ``T_padded // cp_size``, also in a part of a plan."""
        return self.transfers[0].input_rows

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks of a host in plans with two levels; None in plans whose transfers have one step."""
        spec = self.transfers[0]
        return spec.ranks_per_host if isinstance(spec, RelayedSpec) else None

    @property
    def two_levels(self) -> bool:
        """Tells whether transfers have two steps: the ``two_levels`` of plans that share a compilation."""
        return self.ranks_per_host is not None

    @property
    def capacity(self) -> PlanCapacity:
        """The static sizes and numbers of stages, for other plans (``plan_context(capacity=...)``)."""
        backward = None if self.backward is None else self.backward.capacity
        return replace(self.forward_stages.capacity, backward=backward, num_stages=self.stage_counts)

    def by_host(self, ranks_per_host: int) -> "ContextPlan":
        """Returns the same plan with two levels: a row crosses to another host once.

        The network brings a row that several ranks of a host need to one rank of it, its relay, which sends
        it on inside the host; gradients that return for it are summed inside the host, in float32, before one
        row crosses. Rows that ranks of a host need from each other move beside what crosses, and do not wait
        for it; only their gradients do. Relays are chosen so that ranks of a host receive about as many rows
        each. This pays where ranks of one host need the same rows, or one needs many more than others, and
        the network is slow. It takes memory for what comes to relays and for rows of the own host, which
        each rank copies to their places when the relays' rows come.

        `jaxmagi.plan_context` makes such plans by itself where its cost model says so. This method keeps the
        layout and the stages as they were planned, for transfers in one step. Use it before `stack` and
        `pad_to`: capacities of the plans that it returns only go with each other.

        Args:
            ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host. A plan that has two
                levels for such hosts is returned as it is.

        Raises:
            ValueError: ``cp_size`` is no multiple of ``ranks_per_host``, or the plan is traced, stacked, a
                part, or has two levels for other hosts.
        """
        plan = _on_host(self, "by_host")
        if self.two_levels and self.ranks_per_host == ranks_per_host:
            return plan
        forward = plan.forward_stages.by_host(ranks_per_host)
        backward = plan.backward and plan.backward.by_host(ranks_per_host)
        return replace(plan, transfers=forward.transfers, backward=backward)

    @staticmethod
    def stack(plans: Sequence["ContextPlan"]) -> "ContextPlan":
        """Returns the plans of a batch's examples as one, with a new leading axis on every array.

        All are padded to the largest capacity. Use the result with ``jax.vmap`` and
        ``PartitionSpec(data_axis, axis_name)``.

        Raises:
            ValueError: there is no plan, or lengths, ranks, shard lengths, numbers of stages or ranks per
                host differ.
        """
        plans = list_of(plans, ContextPlan, "plans")
        if not plans:
            raise ValueError("ContextPlan.stack needs at least one plan.")
        hosts = [_on_host(plan, "ContextPlan.stack") for plan in plans]
        for name, values in _static_sizes(hosts).items():
            if len(set(values)) > 1:
                advice = {"num_stages": f": {SAME_STAGES}", "ranks_per_host": f": {SAME_LEVELS}"}
                raise ValueError(f"the plans to stack differ in {name}: {values}{advice.get(name, '')}.")
        capacity = functools.reduce(PlanCapacity.union, [plan.capacity for plan in hosts])
        padded = [plan.pad_to(capacity) for plan in hosts]
        return jax.tree.map(lambda *leaves: frozen(np.stack(leaves)), *padded)

    def pad_to(self, capacity: PlanCapacity) -> "ContextPlan":
        """Returns the plan (or stacked plans) with the static sizes of ``capacity``, to share a compilation.

        Sizes may also shrink, down to what the plan uses.

        Raises:
            ValueError: a size is smaller than what the plan uses, the tables would take more than 2**32
                bytes, ``capacity`` is for plans with other numbers of stages, other levels or other hosts, or
                the plan is traced.
        """
        _reject_traced(self, "pad_to")
        require_type(capacity, PlanCapacity, "capacity")
        self.capacity.union(capacity)  # raises where stages differ
        passes = counts_of_passes(self.stage_counts, "num_stages")
        *stack, ranks = self.bands.shape[:-3]
        capacity.check_tables(ranks, passes, plans=math.prod(stack))
        forward = self.forward_stages.pad_to(capacity)
        backward = self.backward and capacity.backward and self.backward.pad_to(capacity.backward)
        return replace(self, bands=forward.bands, transfers=forward.transfers, backward=backward)

    def report(self, cost: CostModel = CostModel()) -> PlanReport:  # noqa: B008 (frozen, so safe to share)
        """Returns what each rank computes, sends and receives, and predicted times.

        Args:
            cost: the model for predicted times, and which ranks share a host. A plan does not keep the model
                that it was planned with: pass it again to see the prediction by which ``num_stages="auto"``
                chose.

        Raises:
            ValueError: the plan is traced, stacked or a part.
        """
        plan = _on_host(self, "report")
        require_type(cost, CostModel, "cost")
        return report_plan(np.asarray(plan.token_order), plan.forward_stages, plan.backward, cost)

    def draw(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the mask coloured by the rank that computes each row, and each rank's area and received rows.

        Args:
            ax: axes to draw into; by default those of a new figure.

        Returns:
            The axes of the mask.

        Raises:
            ImportError: matplotlib is not installed.
        """
        plan = _on_host(self, "draw")
        return draw_plan(np.asarray(plan.token_order), plan.length, plan.forward_stages, plan.report(), ax)


def _static_sizes(plans: Sequence[ContextPlan]) -> dict[str, list[Any]]:
    """Returns the sizes that plans have to agree in to be stacked."""
    names = ("length", "cp_size", "shard_length", "ranks_per_host")
    sizes = {name: [getattr(plan, name) for plan in plans] for name in names}
    return {**sizes, "num_stages": [plan.stage_counts for plan in plans]}


def _reject_traced(plan: ContextPlan, method: str) -> None:
    if is_traced(plan):
        raise ValueError(f"{method} needs the plan's host data, but the plan is traced: call it outside jit.")


def _on_host(plan: ContextPlan, method: str) -> ContextPlan:
    """Returns the plan with numpy leaves; ValueError if it is traced, stacked or a part."""
    _reject_traced(plan, method)
    if plan.bands.ndim != 4 or plan.bands.shape[0] != plan.cp_size:
        raise ValueError(
            f"{method} needs one whole plan, with bands [{plan.cp_size}, {plan.num_stages}, C, 6], "
            f"but the bands are {plan.bands.shape}: it is stacked or a part."
        )
    return jax.tree.map(np.asarray, plan)
