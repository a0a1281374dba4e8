"""Transfers rows from and to one rank, in one step or in two: the base of `group_cast` and `group_reduce`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._dtypes import accumulator_dtype
from .._softmax import Partial
from .._varying import vary_alike
from ._async import AsyncTransfer, start
from ._cuda import MAX_ARRAYS, Kind
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

    def start_cast(self, xs: Sequence[jax.Array], **options: Any) -> AsyncTransfer:
        """Starts `cast`; options are those of `start`."""
        if not self._is_async(xs):
            return AsyncTransfer((), lambda _: self.cast(xs))
        return self._start("cast", xs, [x.dtype for x in xs], **options)

    def start_reduce(
        self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype], **options: Any
    ) -> AsyncTransfer:
        """Starts `reduce`; options are those of `start`."""
        if not self._is_async(xs):
            return AsyncTransfer((), lambda _: self.reduce(xs, dtypes))
        sent = [self.route.round(x) for x in xs]
        transfer = self._start("reduce", sent, _sum_dtypes(sent, dtypes), **options)
        return transfer.then(lambda sums: _convert(sums, dtypes))

    def _start(
        self, kind: Kind, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype], **options: Any
    ) -> AsyncTransfer:
        operands = vary_alike([x[None] for x in (*xs, self.sends, self.receives)])
        transfer = start(kind, operands, dtypes, self.route, **options)
        return transfer.then(lambda ys: [y[0] for y in ys])

    def _is_async(self, xs: Sequence[jax.Array]) -> bool:
        """Returns whether a transfer of these arrays can have a start and an end in the program.

        No array may be empty, and one call has to take all. Without jit, start and end would be in two
        programs. Where a shard_map leaves mesh axes to XLA's partitioner, that cannot split them.
        """
        rows = self.input_rows, self.output_rows, self.route.pair_rows
        sizes = *rows, *(x.size for x in (self.sends, self.receives, *xs))
        mesh = jax.sharding.get_abstract_mesh()
        is_one_program = not jax.config.jax_disable_jit and len(mesh.manual_axes) == len(mesh.axis_names)
        return 0 not in sizes and len(xs) <= MAX_ARRAYS and is_one_program

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
    """Transfers rows across hosts to relay ranks, then inside the hosts; a reduction in the reverse order."""

    between: OneStep
    within: OneStep

    @property
    def input_rows(self) -> int:
        return self.between.input_rows

    @property
    def output_rows(self) -> int:
        return self.within.output_rows

    def cast(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Casts [input_rows, ...] → [output_rows, ...]."""
        return self._cast_within(xs, self.between.cast(xs))

    def start_cast(self, xs: Sequence[jax.Array], **options: Any) -> AsyncTransfer:
        """Starts `cast`, of which the step between hosts is asynchronous; options are those of `start`."""
        transfer = self.between.start_cast(xs, **options)
        return transfer.then(lambda relayed: self._cast_within(xs, relayed))

    def _cast_within(self, xs: Sequence[jax.Array], relayed: Sequence[jax.Array]) -> list[jax.Array]:
        own, relayed = vary_alike(([*xs], [*relayed]))
        return self.within.cast([jnp.concatenate(rows) for rows in zip(own, relayed, strict=True)])

    def reduce(self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> list[jax.Array]:
        """Adds up [output_rows, ...] → [input_rows, ...], rounded to these dtypes.

        Sums of a host cross to other hosts in accumulator dtype, so that nothing is rounded twice; with a
        wire dtype they are rounded to it, like the rows that the sums are made of.
        """
        near, far = self._reduce_within(xs)
        return self._add(near, self.between.reduce(far, [x.dtype for x in far]), dtypes)

    def start_reduce(
        self, xs: Sequence[jax.Array], dtypes: Sequence[jnp.dtype], **options: Any
    ) -> AsyncTransfer:
        """Starts `reduce`, of which the step between hosts is asynchronous; options are those of `start`."""
        near, far = self._reduce_within(xs)
        transfer = self.between.start_reduce(far, [x.dtype for x in far], **options)
        return transfer.then(lambda far: self._add(near, far, dtypes))

    def _reduce_within(self, xs: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the sums of a host for the rank's own rows, and for rows of other hosts."""
        sums = self.within.reduce(xs, [accumulator_dtype(x.dtype) for x in xs])
        return [x[: self.input_rows] for x in sums], [x[self.input_rows :] for x in sums]

    def _add(
        self, near: Sequence[jax.Array], far: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]
    ) -> list[jax.Array]:
        return _convert([x + y for x, y in zip(near, far, strict=True)], dtypes)

    def counts(self) -> jax.Array:
        """Returns to how many places each row goes, int32 [input_rows]."""
        near = self.within.counts()
        # All platforms add up floats, which are exact up to 2**24.
        between = self.between._replace(route=self.between.route._replace(wire_dtype=None))
        (far,) = between.reduce([near[self.input_rows :].astype(jnp.float32)], [jnp.dtype(jnp.float32)])
        return near[: self.input_rows] + far.astype(jnp.int32)

    def merge(self, part: Partial[jax.Array], own: Partial[jax.Array] | None) -> Partial[jax.Array]:
        """Merges parts [output_rows, ...], and own ones, → [input_rows, ...] in accumulator dtype."""
        rows = self.input_rows
        if own is not None:
            own = Partial(self._with_relays(own.out, 0), self._with_relays(own.lse, -jnp.inf))
        out, lse = self.within.merge(part, own)
        return self.between.merge(Partial(out[rows:], lse[rows:]), Partial(out[:rows], lse[:rows]))

    def _with_relays(self, x: jax.Array, fill: float) -> jax.Array:
        """Appends relay rows, which hold ``fill``, to the rank's own rows."""
        shape = (self.between.output_rows, *x.shape[1:])
        return jnp.concatenate([x, jax.lax.full_like(x, fill, shape=shape, sharding=jax.typeof(x).sharding)])


type Transfer = OneStep | TwoSteps
