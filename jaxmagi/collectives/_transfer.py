"""A rank's view of a transfer, in one step or in two: what `group_cast` and `group_reduce` are made of."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._varying import vary_alike
from ._merge import merge_by_lse
from ._portable import accumulator_dtype
from ._primitives import group_cast_p, group_reduce_p
from ._route import Route

type Partial = tuple[jax.Array, jax.Array]
"""Outputs [rows, N, D] and their log-sum-exps [rows, N]."""


class OneStep(NamedTuple):
    """Rows from their ranks to those that need them."""

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
        """[input_rows, ...] → [output_rows, ...]."""
        operands = vary_alike([x[None] for x in (*xs, self.sends, self.receives)])
        return [y[0] for y in group_cast_p.bind(*operands, route=self.route)]

    def reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
        """The sums of [output_rows, ...], rounded to these dtypes: [input_rows, ...]."""
        operands = vary_alike([x[None] for x in (*xs, self.sends, self.receives)])
        sums = group_reduce_p.bind(*operands, route=self.route, out_dtypes=tuple(dtypes))
        return [total[0] for total in sums]

    def counts(self) -> jax.Array:
        """int32 [input_rows]: to how many places each row goes."""
        _, _, row, length, _ = self.sends.T
        used = (length > 0).astype(jnp.int32)
        steps = jax.lax.full_like(row, 0, shape=(self.input_rows + 1,))
        steps = steps.at[row].add(used).at[row + length].add(-used)
        return jnp.cumsum(steps)[:-1].astype(jnp.int32)

    def merge(self, part: Partial, own: Partial | None) -> Partial:
        """Parts [output_rows, ...], and one that is there, → [input_rows, ...] in accumulator dtype."""
        (out, lse), own, sends, receives = vary_alike((part, own, self.sends, self.receives))
        return merge_by_lse(out, lse, own, sends, receives, self.route)


class TwoSteps(NamedTuple):
    """Rows across hosts to relays, then inside the hosts; back in the reverse order."""

    between: OneStep
    within: OneStep

    @property
    def input_rows(self) -> int:
        return self.between.input_rows

    @property
    def output_rows(self) -> int:
        return self.within.output_rows

    def cast(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """[input_rows, ...] → [output_rows, ...]."""
        own, relayed = vary_alike(([*xs], self.between.cast(xs)))
        return self.within.cast([jnp.concatenate(rows) for rows in zip(own, relayed, strict=True)])

    def reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
        """The sums of [output_rows, ...], rounded to these dtypes: [input_rows, ...].

        What a host has added up crosses to others in the dtype of the sums, so that nothing is rounded twice.
        """
        wide = [accumulator_dtype(x.dtype) for x in xs]
        near = self.within.reduce(xs, wide)
        far = self.between.reduce([x[self.input_rows :] for x in near], wide)
        return [
            (x[: self.input_rows] + y).astype(dtype) for x, y, dtype in zip(near, far, dtypes, strict=True)
        ]

    def counts(self) -> jax.Array:
        """int32 [input_rows]: to how many places each row goes."""
        near = self.within.counts()
        # As floats, which sums are made of on all platforms: exact up to 2**24.
        (far,) = self.between.reduce([near[self.input_rows :].astype(jnp.float32)], [jnp.dtype(jnp.float32)])
        return near[: self.input_rows] + far.astype(jnp.int32)

    def merge(self, part: Partial, own: Partial | None) -> Partial:
        """Parts [output_rows, ...], and one that is there, → [input_rows, ...] in accumulator dtype."""
        rows = self.input_rows
        if own is not None:
            own = (self._with_relays(own[0], 0), self._with_relays(own[1], -jnp.inf))
        out, lse = self.within.merge(part, own)
        return self.between.merge((out[rows:], lse[rows:]), (out[:rows], lse[:rows]))

    def _with_relays(self, x: jax.Array, fill: float) -> jax.Array:
        """Own rows with relay rows behind them, which hold ``fill``."""
        shape = (self.between.output_rows, *x.shape[1:])
        return jnp.concatenate([x, jax.lax.full_like(x, fill, shape=shape, sharding=jax.typeof(x).sharding)])


type Transfer = OneStep | TwoSteps
