"""Sends partial attention outputs to the ranks that own the queries, and merges them there by log-sum-exp."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._dtypes import accumulator_dtype
from .._softmax import Partial, SoftmaxState, add_states, normalize, rescale, to_state
from .._varying import vary_alike
from ._portable import NONE, add_in_order, input_row_of_slot
from ._primitives import group_cast_p
from ._route import Route


def merge_by_lse(
    part: Partial[jax.Array],
    own: Partial[jax.Array] | None,
    sends: jax.Array,
    receives: jax.Array,
    route: Route,
) -> Partial[jax.Array]:
    """Returns attention to all keys [input_rows, ...] in accumulator dtype, from that to parts of the keys.

    Args:
        part: [output_rows, N, D] and [output_rows, N], the results of this rank for rows of others; a row
            with log-sum-exp -inf contributes nothing. Outputs travel in the wire dtype.
        own: results for the rank's own rows, [input_rows, N, D] and [input_rows, N]; None for none.
        sends: int32 [M, 5].
        receives: int32 [M, 4].
        route: the route of the cast whose transpose this is.
    """
    wide = accumulator_dtype(part.out.dtype)
    if route.input_rows == 0:  # nothing can be looked up among no rows
        return Partial(_no_rows(part.out.astype(wide)), _no_rows(_widen(part.lse)))
    rows = input_row_of_slot(sends, route)
    sent = route.round(part.out), _widen(part.lse)
    out, lse = _back_to_slots(sent, sends, receives, route)
    lse = jnp.where((rows == NONE)[:, None], -jnp.inf, lse)
    sharding = jax.typeof(lse).sharding  # gathers over Explicit axes need to be told the result's
    row_max = jax.lax.full_like(lse, -jnp.inf, shape=(route.input_rows, *lse.shape[1:]), sharding=sharding)
    # The result does not depend on row_max, so neither do gradients.
    row_max = row_max.at[rows].max(jax.lax.stop_gradient(lse), mode="drop", wrap_negative_indices=False)
    if own is not None:
        row_max = jnp.maximum(row_max, jax.lax.stop_gradient(own.lse).astype(row_max.dtype))
    max_of_slot = row_max.at[rows].get(
        mode="fill", fill_value=0, wrap_negative_indices=False, out_sharding=sharding
    )
    slots = rescale(to_state(Partial(out.astype(wide), lse)), max_of_slot)
    row_sum, out = add_in_order(slots.row_sum, rows, route), add_in_order(slots.out, rows, route)
    state = SoftmaxState(out, row_max, row_sum)
    if own is not None:
        own = Partial(own.out.astype(out.dtype), own.lse.astype(row_max.dtype))
        state = add_states(state, rescale(to_state(own), row_max))
    return normalize(state)


def _no_rows(x: jax.Array) -> jax.Array:
    return jax.lax.full_like(x, 0, shape=(0, *x.shape[1:]), sharding=jax.typeof(x).sharding)


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(accumulator_dtype(x.dtype))


def _back_to_slots(
    xs: Sequence[jax.Array], sends: jax.Array, receives: jax.Array, route: Route
) -> list[jax.Array]:
    """Sends rows [output_rows, ...] back to their slots [slots, ...] at their owners; unused slots are zero.

    It is a cast whose output rows are slots, since GPUs have a fast cast.
    """
    src, slot, row, length = receives.T
    here = route.place() * route.pair_rows
    leaving = jnp.stack([src, slot, row, length, here + slot], axis=1)
    order = jnp.argsort(jnp.where(length > 0, src * route.pair_rows + slot, route.slots))
    dst, slot, _, length, _ = sends.T
    arriving = jnp.stack([dst, slot, dst * route.pair_rows + slot, length], axis=1)
    operands = vary_alike([x[None] for x in (*xs, leaving[order], arriving)])
    return [y[0] for y in group_cast_p.bind(*operands, route=route.back_to_slots)]
