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
from ._capacity import SAME_LEVELS, PlanCapacity, frozen, resize_axis, used_length
from ._cost import CostModel
from ._draw import draw_plan
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

    A rank's queries see its own shard and, behind it, the rows that it receives. Every row is received once,
    and only if a query of the rank sees it.

    Attributes:
        token_order: int32 ``[T_padded]``, the global index of the token at each dispatched position, -1 for
            padding. Itself a valid ``layout`` for `jaxmagi.plan_context`.
        position_ids: int32 ``[T_padded]``, the same with 0 for padding (for rotary embeddings).
        bands: int32 ``[cp, C, 6]``, each rank's mask: row ``q`` of the shard, key ``k`` of the shard and the
            received rows. Unused rows are all zero.
        transfer: which rows of keys and values travel in both passes, and their gradients in the backward
            pass: a `RelayedSpec` in plans with two levels.
        length: tokens of the sequence, without padding. Static.
        cp_size: number of ranks. Static.
    """

    token_order: Int32[jax.Array | np.ndarray, "*stack T_padded"]
    position_ids: Int32[jax.Array | np.ndarray, "*stack T_padded"]
    bands: Int32[jax.Array | np.ndarray, "*stack cp C 6"]
    transfer: GroupCastSpec | RelayedSpec
    length: int = field(metadata={"static": True})
    cp_size: int = field(metadata={"static": True})

    @property
    def shard_length(self) -> int:
        """Tokens of each rank, padding included: ``T_padded // cp_size``, also in a part of a plan."""
        return self.transfer.input_rows

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks of a host in plans with two levels; None in plans whose transfers have one step."""
        return self.transfer.ranks_per_host if isinstance(self.transfer, RelayedSpec) else None

    @property
    def two_levels(self) -> bool:
        """Tells whether the transfer has two steps: the ``two_levels`` of plans that share a compilation."""
        return self.ranks_per_host is not None

    @property
    def capacity(self) -> PlanCapacity:
        """The static sizes, for other plans (``plan_context(capacity=...)``)."""
        return replace(self.transfer.capacity, bands=self.bands.shape[-2])

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
        layout as it was planned, for transfers in one step. Use it before `stack` and
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
        if isinstance(plan.transfer, RelayedSpec):
            raise ValueError(
                f"by_host({ranks_per_host}): the transfer of this plan is in two steps already, "
                f"by_host({plan.transfer.ranks_per_host})."
            )
        return replace(plan, transfer=plan.transfer.by_host(ranks_per_host))

    @staticmethod
    def stack(plans: Sequence["ContextPlan"]) -> "ContextPlan":
        """Returns the plans of a batch's examples as one, with a new leading axis on every array.

        All are padded to the largest capacity. Use the result with ``jax.vmap`` and
        ``PartitionSpec(data_axis, axis_name)``.

        Raises:
            ValueError: there is no plan, or lengths, ranks, shard lengths or ranks per host differ.
        """
        plans = list_of(plans, ContextPlan, "plans")
        if not plans:
            raise ValueError("ContextPlan.stack needs at least one plan.")
        hosts = [_on_host(plan, "ContextPlan.stack") for plan in plans]
        for name in ("length", "cp_size", "shard_length", "ranks_per_host"):
            values = [getattr(plan, name) for plan in hosts]
            if len(set(values)) > 1:
                advice = f": {SAME_LEVELS}" if name == "ranks_per_host" else ""
                raise ValueError(f"the plans to stack differ in {name}: {values}{advice}.")
        capacity = functools.reduce(PlanCapacity.union, [plan.capacity for plan in hosts])
        padded = [plan.pad_to(capacity) for plan in hosts]
        return jax.tree.map(lambda *leaves: frozen(np.stack(leaves)), *padded)

    def pad_to(self, capacity: PlanCapacity) -> "ContextPlan":
        """Returns the plan (or stacked plans) with the static sizes of ``capacity``, to share a compilation.

        Sizes may also shrink, down to what the plan uses.

        Raises:
            ValueError: a size is smaller than what the plan uses, the tables would take more than 2**32
                bytes, ``capacity`` is for plans with other levels or other hosts, or the plan is traced.
        """
        _reject_traced(self, "pad_to")
        require_type(capacity, PlanCapacity, "capacity")
        *stack, ranks = self.bands.shape[:-2]
        capacity.check_tables(ranks, plans=math.prod(stack))
        bands = np.asarray(self.bands)
        capacity.require(replace(self.transfer.used, bands=used_length(bands.any(axis=-1))))
        sizes: dict[str, Any] = {
            name: getattr(capacity, name) for name in ("copies", "output_rows", "pair_rows")
        }
        if capacity.across is not None:
            sizes["across"] = capacity.across
        return replace(
            self, bands=resize_axis(bands, capacity.bands, -2), transfer=self.transfer.padded(**sizes)
        )

    def report(self, cost: CostModel = CostModel()) -> PlanReport:  # noqa: B008 (frozen, so safe to share)
        """Returns what each rank computes, sends and receives, and predicted times.

        Args:
            cost: the model for predicted times, and which ranks share a host. A plan does not keep the model
                that it was planned with.

        Raises:
            ValueError: the plan is traced, stacked or a part.
        """
        plan = _on_host(self, "report")
        require_type(cost, CostModel, "cost")
        token_order, bands = np.asarray(plan.token_order), np.asarray(plan.bands)
        return report_plan(token_order, bands, plan.transfer, cost)

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
        token_order, bands = np.asarray(plan.token_order), np.asarray(plan.bands)
        return draw_plan(token_order, plan.length, bands, plan.transfer, plan.report(), ax)


def _reject_traced(plan: ContextPlan, method: str) -> None:
    if is_traced(plan):
        raise ValueError(f"{method} needs the plan's host data, but the plan is traced: call it outside jit.")


def _on_host(plan: ContextPlan, method: str) -> ContextPlan:
    """Returns the plan with numpy leaves; ValueError if it is traced, stacked or a part."""
    _reject_traced(plan, method)
    if plan.bands.ndim != 3 or plan.bands.shape[0] != plan.cp_size:
        raise ValueError(
            f"{method} needs one whole plan, with bands [{plan.cp_size}, C, 6], but the bands are "
            f"{plan.bands.shape}: it is stacked or a part."
        )
    return jax.tree.map(np.asarray, plan)
