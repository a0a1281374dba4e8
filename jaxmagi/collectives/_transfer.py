"""Transfers rows from and to one rank, in one step or in two: the base of `group_cast` and `group_reduce`."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._dtypes import accumulator_dtype
from .._softmax import Partial
from .._varying import vary_alike
from ._merge import merge_by_lse
from ._primitives import group_cast_p, group_reduce_p, sum_dtype
from ._route import Route


class OneStep(NamedTuple):
    """Transfers rows from their ranks directly to those that need them."""

    sends: jax.Array  # [M, 5]
    receives: jax.Array  # [M, 4]
    route: Route

    @property
    def input_rows(self) -> int:
        return self.route.input_rows

    @property
    def output_rows(self) -> int:
        return self.route.output_rows

    def cast(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Casts [input_rows, ...] → [output_rows, ...]."""
        operands = vary_alike([x[None] for x in (*xs, self.sends, self.receives)])
        return [y[0] for y in group_cast_p.bind(*operands, route=self.route)]

    def reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
        """Adds up [output_rows, ...] → [input_rows, ...], rounded to these dtypes."""
        sent = [self.route.round(x) for x in xs]
        operands = vary_alike([x[None] for x in (*sent, self.sends, self.receives)])
        sums = group_reduce_p.bind(*operands, route=self.route, out_dtypes=_sum_dtypes(sent, dtypes))
        return _convert([total[0] for total in sums], dtypes)

    def counts(self) -> jax.Array:
        """Returns to how many places each row goes, int32 [input_rows]."""
        _, _, row, length, _ = self.sends.T
        used = (length > 0).astype(jnp.int32)
        steps = jax.lax.full_like(row, 0, shape=(self.input_rows + 1,))
        steps = steps.at[row].add(used).at[row + length].add(-used)
        return jnp.cumsum(steps)[:-1].astype(jnp.int32)

    def merge(self, part: Partial[jax.Array], own: Partial[jax.Array] | None) -> Partial[jax.Array]:
        """Merges parts [output_rows, ...], and own ones, → [input_rows, ...] in accumulator dtype."""
        return merge_by_lse(*vary_alike((part, own, self.sends, self.receives)), self.route)


def _sum_dtypes(sent: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> tuple[jnp.dtype, ...]:
    return tuple(sum_dtype(x, dtype) for x, dtype in zip(sent, dtypes, strict=True))


def _convert(xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
    return [x.astype(dtype) for x, dtype in zip(xs, dtypes, strict=True)]


class TwoSteps(NamedTuple):
    """Transfers rows across all ranks, far ones to relays, then inside hosts; a reduction in reverse order.

    In the step across all ranks of a cast, rows that stay in a host move beside those that cross the network.
    In a reduction they move after them, since a rank adds up everything at once. In the step inside hosts
    each rank copies its near rows to their places, and so reads and writes them once more in its own memory.
    If they were in place before, two results, one with near and one with far rows, would have to be merged:
    that takes memory for both, and time for each of their rows.
    """

    across: OneStep
    inside: OneStep

    @property
    def input_rows(self) -> int:
        return self.across.input_rows

    @property
    def output_rows(self) -> int:
        return self.inside.output_rows

    def cast(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Casts [input_rows, ...] → [output_rows, ...]."""
        return self.inside.cast(self.across.cast(xs))

    def reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
        """Adds up [output_rows, ...] → [input_rows, ...], rounded to these dtypes."""
        return self.across.reduce(self._reduce_inside(xs), dtypes)

    def _reduce_inside(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the sums of a host for rows of other hosts, and near rows as they are.

        They travel on in accumulator dtype, so that nothing is rounded twice, and near rows of 16 bits take
        32. With a wire dtype all are rounded to it, like the rows that the sums are made of.
        """
        return self.inside.reduce(xs, [accumulator_dtype(x.dtype) for x in xs])

    def counts(self) -> jax.Array:
        """Returns to how many places each row goes, int32 [input_rows]."""
        across = self.across._replace(route=self.across.route._replace(wire_dtype=None))
        # All platforms add up floats, which are exact up to 2**24.
        single = jnp.dtype(jnp.float32)
        (counts,) = across.reduce([self.inside.counts().astype(single)], [single])
        return counts.astype(jnp.int32)

    def merge(self, part: Partial[jax.Array], own: Partial[jax.Array] | None) -> Partial[jax.Array]:
        """Merges parts [output_rows, ...], and own ones, → [input_rows, ...] in accumulator dtype."""
        return self.across.merge(self.inside.merge(part, None), own)


type Transfer = OneStep | TwoSteps
