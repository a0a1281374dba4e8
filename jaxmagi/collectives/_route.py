"""Holds the static parameters of a transfer."""

import itertools
from typing import NamedTuple

import jax

from ._options import Implementation


class Route(NamedTuple):
    """The static parameters of the primitives; some are those of `CollectiveOptions`."""

    axis_name: str
    input_rows: int
    output_rows: int
    pair_rows: int
    implementation: Implementation
    num_sms: int
    ranks_per_host: int | None  # None: what the hardware says
    wire_dtype: jax.typing.DTypeLike | None  # that summands are rounded to; None: their own
    timeout: float | None  # seconds; None: those of `set_timeout`
    group_size: int | None = None  # consecutive ranks that exchange rows; None: the whole axis

    @property
    def peers(self) -> int:
        """Returns the number of ranks that exchange rows with one of them, itself included."""
        return self.group_size or jax.lax.axis_size(self.axis_name)

    @property
    def slots(self) -> int:
        """Returns the number of slots of a rank for all of its peers."""
        return self.peers * self.pair_rows

    @property
    def groups(self) -> list[list[int]] | None:
        """Returns the ranks of each group, for collectives of JAX."""
        if self.group_size is None:
            return None
        ranks = range(jax.lax.axis_size(self.axis_name))
        return [[*group] for group in itertools.batched(ranks, self.group_size)]

    def place(self) -> jax.Array:
        """Returns the place of the calling rank in its group, by which tables know it."""
        rank = jax.lax.axis_index(self.axis_name)
        return rank if self.group_size is None else rank % self.group_size

    def round(self, x: jax.Array) -> jax.Array:
        """Returns summands in the dtype in which they travel."""
        return x if self.wire_dtype is None else x.astype(self.wire_dtype)

    @property
    def back_to_slots(self) -> "Route":
        """Returns the route of a cast of output rows back to their slots, for `merge_by_lse`.

        Its rows are what `merge_by_lse` rounds, or log-sum-exps, whose gradients are not to be rounded.
        """
        return self._replace(input_rows=self.output_rows, output_rows=self.slots, wire_dtype=None)
