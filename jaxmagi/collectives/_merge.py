"""Partial attention outputs to the ranks that own the queries, merged there by log-sum-exp."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._varying import vary_alike
from ._portable import NONE, accumulator_dtype, add_in_order, input_row_of_slot
from ._primitives import group_cast_p
from ._route import Route


def merge_by_lse(
    out: jax.Array,
    lse: jax.Array,
    own: tuple[jax.Array, jax.Array] | None,
    sends: jax.Array,
    receives: jax.Array,
    route: Route,
) -> tuple[jax.Array, jax.Array]:
    """The output [input_rows, N, D] and log-sum-exp [input_rows, N] of all keys, from those of parts.

    Args:
        out: [output_rows, N, D], normalised within its part.
        lse: [output_rows, N]; -inf where the part has nothing to say.
        own: a part that is there already, [input_rows, N, D] and [input_rows, N].
        sends: int32 [M, 5].
        receives: int32 [M, 4].
        route: the transfer.
    """
    rows = input_row_of_slot(sends, route)
    out, lse = _back_to_slots((out, lse.astype(accumulator_dtype(lse.dtype))), sends, receives, route)
    out = out.astype(accumulator_dtype(out.dtype))
    lse = jnp.where((rows == NONE)[:, None], -jnp.inf, lse)
    sharding = jax.typeof(lse).sharding  # gathers over Explicit axes need to be told the result's
    peak = jax.lax.full_like(lse, -jnp.inf, shape=(route.input_rows, *lse.shape[1:]), sharding=sharding)
    peak = peak.at[rows].max(jax.lax.stop_gradient(lse), mode="drop", wrap_negative_indices=False)
    if own is not None:
        peak = jnp.maximum(peak, jax.lax.stop_gradient(own[1]).astype(peak.dtype))
    peak_of_slot = peak.at[rows].get(
        mode="fill", fill_value=0, wrap_negative_indices=False, out_sharding=sharding
    )
    weight, weighted = _weigh(out, lse, peak_of_slot)
    total, sum_ = add_in_order(weight, rows, route), add_in_order(weighted, rows, route)
    if own is not None:
        weight, weighted = _weigh(own[0].astype(sum_.dtype), own[1].astype(peak.dtype), peak)
        total, sum_ = total + weight, sum_ + weighted
    return _normalise(sum_, total, peak)


def _back_to_slots(
    xs: Sequence[jax.Array], sends: jax.Array, receives: jax.Array, route: Route
) -> list[jax.Array]:
    """[output_rows, ...] → [slots, ...] of the ranks that the rows came from; unused slots are zero.

    A cast whose outputs are slots, as GPUs have a fast one.
    """
    src, slot, row, length = receives.T
    here = route.place() * route.pair_rows
    leaving = jnp.stack([src, slot, row, length, here + slot], axis=1)
    order = jnp.argsort(jnp.where(length > 0, src * route.pair_rows + slot, route.slots))
    dst, slot, _, length, _ = sends.T
    arriving = jnp.stack([dst, slot, dst * route.pair_rows + slot, length], axis=1)
    operands = vary_alike([x[None] for x in (*xs, leaving[order], arriving)])
    return [y[0] for y in group_cast_p.bind(*operands, route=route.back_to_slots)]


def _weigh(out: jax.Array, lse: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A part's weight relative to the peak, and its output times that; 0 for lse = -inf, whatever that is."""
    silent = jnp.isneginf(lse)
    weight = jnp.where(silent, 0, jnp.exp(jnp.where(silent, 0, lse - jnp.where(silent, 0, peak))))
    out = jnp.where(silent[..., None], 0, out)
    return weight, weight[..., None].astype(out.dtype) * out


def _normalise(sum_: jax.Array, total: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
    silent = jnp.isneginf(peak)
    total = jnp.where(silent, 1, total)
    return sum_ / total[..., None].astype(sum_.dtype), jnp.where(silent, -jnp.inf, peak + jnp.log(total))
