"""A rank's view of a transfer, in one step or in two: what `group_cast` and `group_reduce` are made of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._varying import vary_alike
from ._cuda import MOST_ARRAYS, Kind
from ._in_flight import Flight, start
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

    def start_cast(self, xs: Sequence[jax.Array], **options: Any) -> Flight:
        """`cast` in two halves; options as of `start`."""
        if not self._moves(xs):
            return Flight((), lambda _: self.cast(xs))
        return self._start("cast", xs, [x.dtype for x in xs], **options)

    def start_reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype], **options: Any) -> Flight:
        """`reduce` in two halves; options as of `start`."""
        if not self._moves(xs):
            return Flight((), lambda _: self.reduce(xs, dtypes))
        return self._start("reduce", xs, dtypes, **options)

    def _start(
        self, kind: Kind, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype], **options: Any
    ) -> Flight:
        operands = vary_alike([x[None] for x in (*xs, self.sends, self.receives)])
        flight = start(kind, operands, dtypes, self.route, **options)
        return flight.then(lambda ys: [y[0] for y in ys])

    def _moves(self, xs: Sequence[jax.Array]) -> bool:
        """Returns whether two halves make sense.

        There has to be something to move in each array, all of it in one call. Without jit the halves would
        be in two programs. Where a shard_map leaves mesh axes to XLA's partitioner, it cannot split them.
        """
        rows = self.input_rows, self.output_rows, self.route.pair_rows
        sizes = *rows, *(x.size for x in (self.sends, self.receives, *xs))
        mesh = jax.sharding.get_abstract_mesh()
        is_one_program = not jax.config.jax_disable_jit and len(mesh.manual_axes) == len(mesh.axis_names)
        return 0 not in sizes and len(xs) <= MOST_ARRAYS and is_one_program

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
        return self._cast_within(xs, self.between.cast(xs))

    def start_cast(self, xs: Sequence[jax.Array], **options: Any) -> Flight:
        """`cast` in two halves, of which the first is the way between hosts; options as of `start`."""
        flight = self.between.start_cast(xs, **options)
        return flight.then(lambda relayed: self._cast_within(xs, relayed))

    def _cast_within(self, xs: Sequence[jax.Array], relayed: Sequence[jax.Array]) -> list[jax.Array]:
        own, relayed = vary_alike(([*xs], [*relayed]))
        return self.within.cast([jnp.concatenate(rows) for rows in zip(own, relayed, strict=True)])

    def reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
        """The sums of [output_rows, ...], rounded to these dtypes: [input_rows, ...].

        What a host has added up crosses to others in the dtype of the sums, so that nothing is rounded twice.
        """
        near, far = self._reduce_within(xs)
        return self._add(near, self.between.reduce(far, [x.dtype for x in far]), dtypes)

    def start_reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype], **options: Any) -> Flight:
        """`reduce` in two halves, of which the second is the way between hosts; options as of `start`."""
        near, far = self._reduce_within(xs)
        flight = self.between.start_reduce(far, [x.dtype for x in far], **options)
        return flight.then(lambda far: self._add(near, far, dtypes))

    def _reduce_within(self, xs: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """What a host has for the rank's own rows, and for rows of other hosts."""
        sums = self.within.reduce(xs, [accumulator_dtype(x.dtype) for x in xs])
        return [x[: self.input_rows] for x in sums], [x[self.input_rows :] for x in sums]

    def _add(
        self, near: Sequence[jax.Array], far: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]
    ) -> list[jax.Array]:
        return [(x + y).astype(dtype) for x, y, dtype in zip(near, far, dtypes, strict=True)]

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
