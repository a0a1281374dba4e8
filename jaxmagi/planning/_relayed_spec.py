"""A group cast in two steps: across hosts to relays, then from these to the ranks of their host."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from ._capacity import PlanCapacity

if TYPE_CHECKING:
    from ._spec import GroupCastSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class RelayedSpec:
    """A group cast in which a row crosses to another host once, and is handed on there to all that need it.

    Made by `GroupCastSpec.by_host`, and taken by `jaxmagi.group_cast` and `jaxmagi.group_reduce` like the
    spec that it is made from: the same rows go to the same places. The rank that a row is brought to first,
    its relay, is one of those that need it.

    Attributes:
        between: the step across hosts: rows of a rank to its relay rows in other hosts.
        within: the step inside each host: from a rank's own rows, followed by its relay rows, to what the
            whole transfer brings.
        ranks_per_host: ranks with the same ``rank // ranks_per_host`` share a host. Static.
    """

    between: "GroupCastSpec"
    within: "GroupCastSpec"
    ranks_per_host: int = field(metadata={"static": True})

    @property
    def input_rows(self) -> int:
        """Rows of each rank's input."""
        return self.between.input_rows

    @property
    def output_rows(self) -> int:
        """Rows of each rank's output."""
        return self.within.output_rows

    @property
    def rows_between_hosts(self) -> int:
        """Rows that cross between hosts: one for each row and other host that needs it."""
        return int(np.asarray(self.between.sends)[..., 3].sum(dtype=np.int64))

    @property
    def capacity(self) -> PlanCapacity:
        """The static sizes (``bands`` is 0)."""
        return replace(self.within.capacity, between=self.between.capacity)

    @property
    def used(self) -> PlanCapacity:
        """The smallest static sizes that hold what the host arrays transfer (``bands`` is 0)."""
        return replace(self.within.used, between=self.between.used)

    def padded(
        self, *, copies: int, output_rows: int, pair_rows: int, between: PlanCapacity
    ) -> "RelayedSpec":
        """The same transfer with other static sizes, those of ``between`` for the step across hosts.

        Raises:
            ValueError: a size is smaller than what the transfer uses.
        """
        sizes = PlanCapacity(0, copies, pair_rows, output_rows, between=between)
        sizes.require(self.used)
        within = self.within.padded(copies=copies, output_rows=output_rows, pair_rows=pair_rows)
        return RelayedSpec(
            between=self.between.padded(
                copies=between.copies, output_rows=between.output_rows, pair_rows=between.pair_rows
            ),
            within=replace(within, input_rows=self.input_rows + between.output_rows),
            ranks_per_host=self.ranks_per_host,
        )
