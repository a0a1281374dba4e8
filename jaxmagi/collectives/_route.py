"""Holds the static parameters of a transfer."""

import itertools
from typing import Literal, NamedTuple

import jax

type Implementation = Literal["native", "nccl", "xla"] | None

IMPLEMENTATIONS = ("native", "nccl", "xla", None)

NUM_SMS = 16
"""The default number of multiprocessors of the native kernels."""

MAX_SMS = 132


class Route(NamedTuple):
    """The static parameters of the primitives."""

    axis_name: str
    input_rows: int
    output_rows: int
    pair_rows: int
    implementation: Implementation = None
    num_sms: int = NUM_SMS
    ranks_per_host: int | None = None  # None: what the hardware says
    group_size: int | None = None  # consecutive ranks that exchange rows; None: the whole axis

    @property
    def slots(self) -> int:
        """Returns the number of slots of all pair buffers of a rank."""
        return (self.group_size or jax.lax.axis_size(self.axis_name)) * self.pair_rows

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

    @property
    def back_to_slots(self) -> "Route":
        """Returns the route of a cast of output rows back to their slots, for `merge_by_lse`."""
        return self._replace(input_rows=self.output_rows, output_rows=self.slots)
