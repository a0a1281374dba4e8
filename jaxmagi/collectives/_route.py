"""The static side of a transfer: sizes, and how the rows shall travel."""

from typing import Literal, NamedTuple

import jax

type Implementation = Literal["native", "nccl", "xla"] | None

IMPLEMENTATIONS = ("native", "nccl", "xla", None)

NUM_SMS = 16
"""Multiprocessors of the native kernels, where the caller says nothing."""

MOST_SMS = 132


class Route(NamedTuple):
    """The static arguments of the primitives."""

    axis_name: str
    input_rows: int
    output_rows: int
    pair_rows: int
    implementation: Implementation = None
    num_sms: int = NUM_SMS
    ranks_per_host: int | None = None  # None: what the hardware says

    @property
    def slots(self) -> int:
        """The slots of all pair buffers of a rank."""
        return jax.lax.axis_size(self.axis_name) * self.pair_rows

    @property
    def back_to_slots(self) -> "Route":
        """That of a cast of output rows back to the slots that they came from (see `merge_by_lse`)."""
        return self._replace(input_rows=self.output_rows, output_rows=self.slots)
