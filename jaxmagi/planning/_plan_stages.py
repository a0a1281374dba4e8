"""One pass of a plan: the attention calls of each rank and the transfers that they wait for."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from ._capacity import PlanCapacity, resize_axis, used_length
from ._received import TokenRuns, joined, received_runs
from ._spec import GroupCastSpec, RelayedSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PlanStages:
    """The attention calls of each rank in one pass, and the transfers that they wait for.

    Attributes:
        bands: see `jaxmagi.ContextPlan`.
        transfers: see `jaxmagi.ContextPlan`.
    """

    bands: Int32[jax.Array | np.ndarray, "*stack cp num_stages C 6"]
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
        """Returns the same stages with other static sizes; ValueError if one is smaller than what is used."""
        bands = np.asarray(self.bands)
        used = functools.reduce(PlanCapacity.union, [spec.used for spec in self.transfers])
        sizes = replace(capacity, backward=None, num_stages=None)
        sizes.require(replace(used, bands=used_length(bands.any(axis=-1))))
        return PlanStages(resize_axis(bands, capacity.bands, -2), _pad_transfers(self.transfers, capacity))

    def by_host(self, ranks_per_host: int) -> "PlanStages":
        """Returns the same stages with transfers in two steps, as in `ContextPlan.by_host`."""
        return PlanStages(self.bands, pad_alike([_relayed(spec, ranks_per_host) for spec in self.transfers]))


def key_runs(stages: PlanStages, own: TokenRuns) -> list[TokenRuns]:
    """Returns the tokens in the key buffers of each stage; ``own`` are those of the shards."""
    received = [received_runs(spec, own) for spec in stages.transfers]
    if stages.num_stages > 1:
        return [own, *received]
    return [joined(own, received[0].shifted(stages.transfers[0].input_rows))]


def pad_alike(transfers: Sequence[RelayedSpec]) -> tuple[GroupCastSpec | RelayedSpec, ...]:
    """Returns transfers of one pass with the largest of their static sizes."""
    sizes = functools.reduce(PlanCapacity.union, [spec.capacity for spec in transfers])
    return _pad_transfers(transfers, sizes)


def _pad_transfers(
    transfers: Sequence[GroupCastSpec | RelayedSpec], capacity: PlanCapacity
) -> tuple[GroupCastSpec | RelayedSpec, ...]:
    """Returns the transfers of a pass with the static sizes of ``capacity``."""
    sizes: dict[str, Any] = {name: getattr(capacity, name) for name in ("copies", "output_rows", "pair_rows")}
    if capacity.across is not None:
        sizes["across"] = capacity.across
    return tuple(spec.padded(**sizes) for spec in transfers)


def _relayed(spec: GroupCastSpec | RelayedSpec, ranks_per_host: int) -> RelayedSpec:
    if isinstance(spec, RelayedSpec):
        raise ValueError(
            f"by_host({ranks_per_host}): the transfers of this plan are in two steps already, "
            f"by_host({spec.ranks_per_host})."
        )
    return spec.by_host(ranks_per_host)
