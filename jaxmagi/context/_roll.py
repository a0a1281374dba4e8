"""Rolls dispatched arrays along the sequence: only rows that leave their rank are sent."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Shaped

from .._checks import MAX_LENGTH, integer, is_traced, jax_array
from .._varying import vary_alike
from ..collectives import axis_size, last_at_most, on_this_rank
from ..planning import ContextPlan
from ._dispatch import PADDING
from ._validation import check_fill, check_plan, check_ranks

_RUNS_PER_ROUND = 16  # of consecutive tokens; the planner gives a rank about as many chunks


def roll(
    x: Shaped[Array | np.ndarray, "tokens_per_rank ..."],
    plan: ContextPlan,
    shift: int,
    *,
    axis_name: str,
    segment_ids: Int[Array | np.ndarray, " tokens_per_rank"] | None = None,
    padding_id: int = 0,
    fill: ArrayLike = 0,
) -> Shaped[Array, "tokens_per_rank ..."]:
    """Rolls dispatched tokens along the sequence, without undispatching. Call it inside ``jax.shard_map``.

    The token at position ``p`` moves to ``p + shift``, as in ``jnp.roll``, but nothing wraps around: the
    result is the dispatched form of a rolled global array, with ``fill`` at positions that nothing reaches
    and at the plan's padding. Targets of next-token prediction are ``roll(tokens, plan, -1, ...)``, those of
    the token after that take -2.

    Ranks send each other only rows that leave their rank, ``abs(shift)`` for each run of consecutive tokens
    if runs are longer than that, and every rank gets those of all others. They go in rounds, most often one,
    whose rows take no more memory than x. The number of rounds depends on the plan's arrays, so that one
    compilation serves different plans; a GPU has to tell it to the host. Where ``abs(shift)`` is as long as
    runs, about all rows are sent.

    Differentiable in reverse mode, any number of times: the gradient of x is rolled back. It works under
    ``jax.vmap``, over x, the plan (`ContextPlan.stack`) or both.

    Args:
        x: this rank's part of a dispatched array, of any numeric dtype or boolean.
        plan: a plan by `jaxmagi.plan_context`, whole or sharded by ``PartitionSpec(axis_name)``.
        shift: positions to move by, from -2**30 to 2**30. Static.
        axis_name: mesh axis over which the tokens are spread.
        segment_ids: this rank's part of the dispatched ids of documents, as for
            `jaxmagi.masks.from_segment_ids`. A value only moves to a position with the id of its own, so that
            targets do not cross documents with different ids; they fit into int32. A mask does not say where
            documents end: the branches of `jaxmagi.masks.shared_prefix` are joined by what all of them see.
            Lengths do, but their number changes from step to step, and with it what is compiled;
            ``numpy.repeat(1 + numpy.arange(len(lengths)), lengths)`` makes ids of them.
        padding_id: the id of padding inside the sequence, where nothing arrives. With ``segment_ids`` only.
        fill: the value where nothing arrives, such as the label that a loss ignores, one that the dtype of x
            has. It gets no gradient.

    Returns:
        This rank's part of the rolled array.

    Raises:
        ValueError: the axis is not mapped over by a surrounding shard_map, the plan is for another number of
            ranks or stacked, x or ``segment_ids`` has another number of tokens, ``segment_ids`` are no
            integers, x cannot hold ``fill``, or ``shift`` is no integer in its range.

    Examples:
        >>> ranks, auto = jax.device_count(), jax.sharding.AxisType.Auto
        >>> plan = plan_context(masks.causal(64), cp_size=ranks)
        >>> mesh = jax.make_mesh((ranks,), ("context",), axis_types=(auto,))
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=jax.P("context"), out_specs=jax.P("context"))
        ... def targets(tokens, plan):
        ...     return roll(tokens, plan, -1, axis_name="context", fill=-100)
        >>> undispatch(targets(dispatch(jnp.arange(64), plan), plan), plan)[-3:].tolist()
        [62, 63, -100]
    """
    check_plan(plan)
    shift = _checked_shift(shift)
    size = axis_size(axis_name)
    check_ranks(plan, axis_name, size)
    order = _order_of_rank(plan, axis_name)
    x = jax_array(x, "x")
    _check_shard("x", x, plan)
    if np.ndim(fill):
        raise ValueError(f"fill must be a scalar, but it has shape {np.shape(fill)}.")
    check_fill(fill, x.dtype, "fill")
    padding_id = integer(padding_id, "padding_id", minimum=-(2**31), maximum=2**31 - 1)
    x, order = vary_alike((x, order))
    way = _Way(shift, plan.length, axis_name, size)
    source = order - shift
    reached = (order != PADDING) & (source >= 0) & (source < plan.length)
    if segment_ids is not None:
        ids = _checked_ids(segment_ids, plan)
        x, order, ids, reached = vary_alike((x, order, ids, reached))
        reached &= (_move(ids, order, way) == ids) & (ids != padding_id)
    reached = reached.reshape(-1, *[1] * (x.ndim - 1))
    move = _move_differentiably if jnp.issubdtype(x.dtype, jnp.inexact) else _move
    return jnp.where(reached, move(x, order, way), jax.lax.stop_gradient(jnp.asarray(fill, x.dtype)))


class _Way(NamedTuple):
    """Says how far rows move, and among whom. Static."""

    shift: int
    length: int  # of the sequence
    axis_name: str
    ranks: int

    @property
    def back(self) -> "_Way":
        return self._replace(shift=-self.shift)

    def rows_per_round(self, rows: int) -> int:
        """Returns how many rows a rank sends in a round: all ranks together about as many as it has."""
        return max(1, min(_RUNS_PER_ROUND * abs(self.shift), -(-rows // self.ranks)))


def _move(x: jax.Array, order: jax.Array, way: _Way) -> jax.Array:
    """Moves rows [tokens_per_rank, ...] to their places on all ranks. Places that no row reaches are zero."""
    rows = order.shape[0]
    if rows == 0 or x.size == 0 or way.shift == 0:
        return x
    target = order + way.shift
    target = jnp.where((order != PADDING) & (target >= 0) & (target < way.length), target, PADDING)
    by_token = jnp.argsort(order)
    sorted_order = order[by_token]

    def put(out: jax.Array, tokens: jax.Array, values: jax.Array) -> jax.Array:
        return _scatter(out, _find(sorted_order, by_token, tokens), values)

    leaves = (target != PADDING) & (_find(sorted_order, by_token, target) == rows)
    queue = jnp.argsort(~leaves)  # rows that leave come first
    count = jnp.sum(leaves, dtype=jnp.int32)
    most = jax.lax.pmax(count, way.axis_name)
    per_round = way.rows_per_round(rows)

    def send(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sent, out = state
        place = sent + jnp.arange(per_round, dtype=jnp.int32)
        chosen = queue[jnp.minimum(place, rows - 1)]
        tokens = jnp.where(place < count, target[chosen], PADDING)
        tokens, values = (_gather_ranks(part, way) for part in (tokens, _take(x, chosen)))
        return sent + per_round, put(out, tokens, values)

    def is_left(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return state[0] < most

    inside = put(jax.lax.full_like(x, 0), target, x)
    return jax.lax.while_loop(is_left, send, (jax.lax.full_like(most, 0), inside))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _move_differentiably(x: jax.Array, order: jax.Array, way: _Way) -> jax.Array:
    return _move(x, order, way)


def _move_forward(x: jax.Array, order: jax.Array, way: _Way) -> tuple[jax.Array, jax.Array]:
    return _move_differentiably(x, order, way), order


def _move_backward(way: _Way, order: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _move_differentiably(gradient, order, way.back), None


_move_differentiably.defvjp(_move_forward, _move_backward)


def _find(sorted_order: jax.Array, by_token: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the row of each token on this rank, and one past the last row for tokens that it has not."""
    at = last_at_most(sorted_order, tokens)
    found = (at >= 0) & (sorted_order[at] == tokens) & (tokens != PADDING)
    return jnp.where(found, by_token[at], sorted_order.shape[0])


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[rows].get(mode="promise_in_bounds")


def _scatter(out: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Puts values into these rows, and drops those for rows past the end."""
    return out.at[rows].set(values, mode="drop", out_sharding=jax.typeof(out).sharding)


def _gather_ranks(x: jax.Array, way: _Way) -> jax.Array:
    return jax.lax.all_gather(x, way.axis_name, tiled=True)


def _order_of_rank(plan: ContextPlan, axis_name: str) -> jax.Array:
    """Returns the tokens at the calling rank's positions."""
    order = plan.token_order
    if order.ndim != 1:
        raise ValueError(
            f"roll takes the plan of one sequence, but this one is stacked (token_order {order.shape}): use "
            "jax.vmap over x and plan."
        )
    return on_this_rank(order.reshape(-1, plan.shard_length), axis_name, "the plan's token_order")[0]


def _checked_shift(shift: Any) -> int:
    if is_traced(shift):
        raise ValueError("shift is traced, but it decides how much is sent at once: give a Python integer.")
    return integer(shift, "shift", minimum=-MAX_LENGTH, maximum=MAX_LENGTH)


def _checked_ids(segment_ids: Any, plan: ContextPlan) -> jax.Array:
    ids = jax_array(segment_ids, "segment_ids")
    _check_shard("segment_ids", ids, plan)
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids must be integers [{plan.shard_length}], but are {ids.dtype.name} {ids.shape}."
        )
    return ids


def _check_shard(name: str, x: jax.Array, plan: ContextPlan) -> None:
    if x.ndim == 0 or x.shape[0] != plan.shard_length:
        raise ValueError(
            f"{name} must have the {plan.shard_length} tokens of a rank along its first axis, but has shape "
            f"{x.shape}: see jaxmagi.dispatch."
        )
