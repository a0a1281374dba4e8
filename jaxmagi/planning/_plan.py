"""The plan of one mask over a mesh axis, as arrays in a pytree."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._checks import is_traced
from ._capacity import SAME_STAGES, PlanCapacity, StageCounts, frozen, resize_axis, used_length
from ._cost import CostModel
from ._draw import draw_plan
from ._relayed_spec import RelayedSpec
from ._report import PlanReport, report_plan
from ._spec import GroupCastSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PlanStages:
    """The attention calls of each rank in one pass, and the transfers that they wait for.

    Attributes:
        bands: see `jaxmagi.ContextPlan`.
        transfers: see `jaxmagi.ContextPlan`.
    """

    bands: jax.Array | np.ndarray
    transfers: tuple[GroupCastSpec | RelayedSpec, ...]

    @property
    def num_stages(self) -> int:
        """Attention calls of a rank."""
        return self.bands.shape[-3]

    @property
    def capacity(self) -> PlanCapacity:
        """The static sizes of the arrays."""
        return replace(self.transfers[0].capacity, bands=self.bands.shape[-2])

    def pad_to(self, capacity: PlanCapacity) -> "PlanStages":
        """The same with other static sizes. Raises ValueError if one is smaller than what is used."""
        bands = np.asarray(self.bands)
        used = functools.reduce(PlanCapacity.union, [spec.used for spec in self.transfers])
        sizes = replace(capacity, backward=None, num_stages=None)
        sizes.require(replace(used, bands=used_length(bands.any(axis=-1))))
        return PlanStages(resize_axis(bands, capacity.bands, -2), _pad_transfers(self.transfers, capacity))

    def by_host(self, ranks_per_host: int) -> "PlanStages":
        """The same with transfers in two steps: see `ContextPlan.by_host`."""
        relayed = [_relayed(spec, ranks_per_host) for spec in self.transfers]
        sizes = functools.reduce(PlanCapacity.union, [spec.capacity for spec in relayed])
        return PlanStages(self.bands, _pad_transfers(relayed, sizes))


def _pad_transfers(
    transfers: Sequence[GroupCastSpec | RelayedSpec], capacity: PlanCapacity
) -> tuple[GroupCastSpec | RelayedSpec, ...]:
    """The transfers of a pass with the static sizes of ``capacity``."""
    sizes: dict[str, Any] = {name: getattr(capacity, name) for name in ("copies", "output_rows", "pair_rows")}
    if capacity.between is not None:
        sizes["between"] = capacity.between
    return tuple(spec.padded(**sizes) for spec in transfers)


def _relayed(spec: GroupCastSpec | RelayedSpec, ranks_per_host: int) -> RelayedSpec:
    if isinstance(spec, RelayedSpec):
        raise ValueError(
            f"by_host({ranks_per_host}): the transfers of this plan are in two steps already, "
            f"by_host({spec.ranks_per_host})."
        )
    return spec.by_host(ranks_per_host)


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
            `RelayedSpec` in plans by `by_host`.
        length: tokens of the sequence, without padding. Static.
        cp_size: number of ranks. Static.
        num_stages: attention calls of a rank in the forward pass. Static.
        backward: bands and transfers of the backward pass, where that is staged in its own way; None where it
            takes those of the forward pass.
    """

    token_order: jax.Array | np.ndarray
    position_ids: jax.Array | np.ndarray
    bands: jax.Array | np.ndarray
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
        """That of `by_host`; None in plans whose transfers have one step."""
        spec = self.transfers[0]
        return spec.ranks_per_host if isinstance(spec, RelayedSpec) else None

    @property
    def capacity(self) -> PlanCapacity:
        """The static sizes and numbers of stages, for other plans (``plan_context(capacity=...)``)."""
        backward = None if self.backward is None else self.backward.capacity
        return replace(self.forward_stages.capacity, backward=backward, num_stages=self.stage_counts)

    def by_host(self, ranks_per_host: int) -> "ContextPlan":
        """The same plan with transfers in two steps, so that a row crosses to another host once.

        A row that several ranks of a host need is brought to one of them, its relay, over the network, and
        handed on inside the host; gradients that return for it are added up inside the host, in float32,
        before one row crosses. Worth it where ranks of one host need the same rows and the network is slow.
        It takes memory for the relay rows, and a copy of the own ones.

        Use it before `stack` and `pad_to`: capacities of what it returns go with each other only. The layout
        and the stages stay as they were planned, for transfers in one step.

        Args:
            ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host.

        Raises:
            ValueError: ``cp_size`` is no multiple of ``ranks_per_host``, or the plan is traced, stacked, a
                part, or comes from this method.
        """
        plan = _on_host(self, "by_host")
        forward = plan.forward_stages.by_host(ranks_per_host)
        backward = plan.backward and plan.backward.by_host(ranks_per_host)
        return replace(plan, transfers=forward.transfers, backward=backward)

    @staticmethod
    def stack(plans: Sequence["ContextPlan"]) -> "ContextPlan":
        """Plans of a batch's examples as one, with a new leading axis on every array.

        For ``PartitionSpec(data_axis, axis_name)`` and ``jax.vmap``. All are padded to the largest capacity.

        Raises:
            ValueError: there is no plan, or lengths, ranks, shard lengths, numbers of stages or ranks per
                host differ.
        """
        if not plans:
            raise ValueError("ContextPlan.stack needs at least one plan.")
        hosts = [_on_host(plan, "ContextPlan.stack") for plan in plans]
        for name, values in _static_sizes(hosts).items():
            if len(set(values)) > 1:
                advice = f": {SAME_STAGES}" if name == "num_stages" else ""
                raise ValueError(f"the plans to stack differ in {name}: {values}{advice}.")
        capacity = functools.reduce(PlanCapacity.union, [plan.capacity for plan in hosts])
        padded = [plan.pad_to(capacity) for plan in hosts]
        return jax.tree.map(lambda *leaves: frozen(np.stack(leaves)), *padded)

    def pad_to(self, capacity: PlanCapacity) -> "ContextPlan":
        """The same plan (or stacked plans) with the static sizes of ``capacity``, to share a compilation.

        Sizes may also shrink, to what the plan uses at least.

        Raises:
            ValueError: a size is smaller than what the plan uses, ``capacity`` is for plans with other
                numbers of stages, or the plan is traced.
        """
        _reject_traced(self, "pad_to")
        self.capacity.union(capacity)  # raises where stages differ
        forward = self.forward_stages.pad_to(capacity)
        backward = self.backward and capacity.backward and self.backward.pad_to(capacity.backward)
        return replace(self, bands=forward.bands, transfers=forward.transfers, backward=backward)

    def report(self, cost: CostModel = CostModel()) -> PlanReport:  # noqa: B008 (frozen, so safe to share)
        """What each rank computes, sends and receives, and the time that a model of the machine predicts.

        Args:
            cost: the model for predicted times, and which ranks share a host. A plan does not keep the one
                that it was planned with: pass that again to see the prediction that ``num_stages="auto"``
                went by.

        Raises:
            ValueError: the plan is traced, stacked or a part.
        """
        return report_plan(_on_host(self, "report"), cost)

    def draw(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the mask coloured by the rank that computes each row, and each rank's area and received rows.

        Args:
            ax: axes to draw into; by default those of a new figure.

        Returns:
            The axes of the mask.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return draw_plan(_on_host(self, "draw"), ax)


def _static_sizes(plans: Sequence[ContextPlan]) -> dict[str, list[Any]]:
    """What plans have to agree in to be stacked."""
    names = ("length", "cp_size", "shard_length", "ranks_per_host")
    sizes = {name: [getattr(plan, name) for plan in plans] for name in names}
    return {**sizes, "num_stages": [plan.stage_counts for plan in plans]}


def _reject_traced(plan: ContextPlan, method: str) -> None:
    if is_traced(plan):
        raise ValueError(f"{method} needs the plan's host data, but the plan is traced: call it outside jit.")


def _on_host(plan: ContextPlan, method: str) -> ContextPlan:
    """The plan with numpy leaves; ValueError when it is traced or stacked."""
    _reject_traced(plan, method)
    if plan.bands.ndim != 4 or plan.bands.shape[0] != plan.cp_size:
        raise ValueError(
            f"{method} needs one whole plan, with bands [{plan.cp_size}, {plan.num_stages}, C, 6], "
            f"but the bands are {plan.bands.shape}: it is stacked or a part."
        )
    return jax.tree.map(np.asarray, plan)
