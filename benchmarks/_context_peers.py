"""Other ways to spread attention over ranks, each written as well as it can be on our own local kernel.

Functions of a rank's part, inside shard_map: queries [T, N, D], keys and values [S, K, D]. Partial outputs,
sums over steps and gradients that travel are in float32 (float64 for float64), as in ours. What a mask hides
from all ranks is known when a peer is made, and skipped.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._local_bands import seen, stacked, zigzag
from jaxmagi import AttnMask, context_attention, plan_context
from jaxmagi.attention import (
    Partial,
    accumulator_dtype,
    attention_backward,
    attention_forward,
    row_delta,
)
from jaxmagi.calibration._chain import AXIS

type KeyValue = tuple[jax.Array, jax.Array]
type Forward = Callable[..., tuple[jax.Array, Any]]
"""From query, key, value and tables: the output, and what the backward pass needs of them."""
type Backward = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""From that, tables and the cotangent: the gradients of query, key and value."""


class Method(NamedTuple):
    """A way to spread attention under one mask.

    Attributes:
        attend: of a rank's query, key, value and tables; differentiable.
        tables: arrays that lead with the ranks.
        tokens: int32 [cp, T], the tokens of each rank's queries, and of its keys where there are as many.
        key_rows: keys and values that a rank has.
    """

    attend: Callable[..., jax.Array]
    tables: Any
    tokens: np.ndarray
    key_rows: int


type Maker = Callable[[AttnMask, int, str | None], Method]
"""From a mask, the number of ranks, and the implementation of the local kernel."""


def ours(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Keys that are needed, by group casts."""
    plan = plan_context(mask, cp_size)
    attend = functools.partial(context_attention, axis_name=AXIS, implementation=implementation)
    return Method(attend, plan, np.asarray(plan.token_order).reshape(cp_size, -1), plan.shard_length)


def kernel_alone(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """The local kernel on the queries that ours gives to a rank, which has all keys: nothing is sent.

    Not a way to spread attention, but what such ways are held against.
    """
    tokens = ours(mask, cp_size, implementation).tokens
    keys = np.arange(mask.kv_len)
    tables = stacked([[seen(np.asarray(mask.bands), queries, keys)] for queries in tokens])
    forward = functools.partial(_forward, implementation=implementation)
    backward = functools.partial(_backward, implementation=implementation)
    return Method(_differentiable(forward, backward), tables, tokens, mask.kv_len)


def ring(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Keys and values go round, in the zigzag layout, while those that came before are attended to.

    Steps in which no rank sees anything are left out, of the way too.
    """
    tokens = zigzag(mask.q_len, cp_size)
    bands = np.asarray(mask.bands)
    # Table i of a rank is for the keys that come from i ranks before.
    tables = [
        [seen(bands, tokens[rank], tokens[rank - step]) for step in range(cp_size)] for rank in range(cp_size)
    ]
    steps = [step for step in range(cp_size) if step == 0 or any(len(row[step]) for row in tables)]
    forward = functools.partial(_ring_forward, steps=steps, implementation=implementation)
    backward = functools.partial(_ring_backward, steps=steps, implementation=implementation)
    tables = stacked([[row[step] for step in steps] for row in tables])
    return Method(_differentiable(forward, backward), tables, tokens, mask.kv_len // cp_size)


def all_gather(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """All keys and values are gathered, in the zigzag layout, and attended to at once."""
    tokens = zigzag(mask.q_len, cp_size)
    tables = stacked([[seen(np.asarray(mask.bands), queries, tokens.reshape(-1))] for queries in tokens])
    forward = functools.partial(_gathered_forward, implementation=implementation)
    backward = functools.partial(_gathered_backward, implementation=implementation)
    return Method(_differentiable(forward, backward), tables, tokens, mask.kv_len // cp_size)


def ulysses(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Heads instead of tokens while attention runs, by all-to-alls before and behind.

    Needs key heads that the ranks divide.
    """
    tokens = np.arange(mask.q_len, dtype=np.int32).reshape(cp_size, -1)
    tables = stacked([[np.asarray(mask.bands)]] * cp_size)
    forward = functools.partial(_ulysses_forward, implementation=implementation)
    backward = functools.partial(_ulysses_backward, implementation=implementation)
    return Method(_differentiable(forward, backward), tables, tokens, mask.kv_len // cp_size)


OURS, ALONE = "ours", "kernel alone"
PEERS: dict[str, Maker] = {"ring": ring, "all-gather": all_gather, "Ulysses": ulysses}
METHODS: dict[str, Maker] = {OURS: ours, **PEERS, ALONE: kernel_alone}


def _differentiable(forward: Forward, backward: Backward) -> Callable[..., jax.Array]:
    attend = jax.custom_vjp(lambda *operands: forward(*operands)[0])

    def attend_fwd(query: Any, key: Any, value: Any, tables: Any) -> tuple[jax.Array, Any]:
        out, saved = forward(query, key, value, tables)
        return out, (saved, tables)

    def attend_bwd(saved: Any, dout: jax.Array) -> tuple[Any, ...]:
        return (*backward(*saved, dout), None)

    attend.defvjp(attend_fwd, attend_bwd)
    return attend


# --- the local kernel ---


class Saved(NamedTuple):
    """Of the forward pass, for the backward pass."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    result: Partial[jax.Array]  # [T, N, D], in the dtype of query, and [T, N]


def _attend(
    query: jax.Array,
    keys: KeyValue,
    bands: jax.Array,
    *,
    out_dtype: Any,
    implementation: str | None,
    previous: Partial[jax.Array] | None = None,
) -> Partial[jax.Array]:
    """Attention to some keys and to those of ``previous``, [1, T, N, D] and [1, T, N], by bands [1, C, 6]."""
    no_sinks = jnp.full(query.shape[1], -jnp.inf, accumulator_dtype(query.dtype))
    return Partial(
        *attention_forward(
            query[None],
            keys[0][None],
            keys[1][None],
            bands,
            no_sinks,
            scale=query.shape[-1] ** -0.5,
            soft_cap=0,
            out_dtype=out_dtype,
            implementation=implementation,
            previous=previous,
        )
    )


def _gradients(
    saved: Saved,
    keys: KeyValue,
    bands: jax.Array,
    dout: jax.Array,
    delta: jax.Array,
    *,
    dtype: Any,
    implementation: str | None,
) -> tuple[jax.Array, KeyValue]:
    """Of the queries, and of some keys and values."""
    dq, dk, dv = attention_backward(
        saved.query[None],
        keys[0][None],
        keys[1][None],
        bands,
        dout[None],
        saved.result.lse[None],
        delta[None],
        scale=saved.query.shape[-1] ** -0.5,
        soft_cap=0,
        deterministic=False,
        grad_dtype=dtype,
        implementation=implementation,
    )
    return dq[0], (dk[0], dv[0])


def _delta(saved: Saved, dout: jax.Array) -> jax.Array:
    return row_delta(saved.result, Partial(dout, jnp.zeros_like(saved.result.lse)))


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, tables: jax.Array, *, implementation: str | None
) -> tuple[jax.Array, Saved]:
    out, lse = _attend(
        query, (key, value), tables[:, 0], out_dtype=query.dtype, implementation=implementation
    )
    return out[0], Saved(query, key, value, Partial(out[0], lse[0]))


def _backward(
    saved: Saved, tables: jax.Array, dout: jax.Array, *, implementation: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    delta, dtype = _delta(saved, dout), saved.query.dtype
    keys = (saved.key, saved.value)
    dq, (dk, dv) = _gradients(
        saved, keys, tables[:, 0], dout, delta, dtype=dtype, implementation=implementation
    )
    return dq, dk, dv


# --- ring ---


def _shift[Tree](tree: Tree, by: int) -> Tree:
    """To the rank whose number is so much larger."""
    size = jax.lax.axis_size(AXIS)
    pairs = [(rank, (rank + by) % size) for rank in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _ring_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tables: jax.Array,
    *,
    steps: list[int],
    implementation: str | None,
) -> tuple[jax.Array, Saved]:
    out_dtype = query.dtype if len(steps) == 1 else accumulator_dtype(query.dtype)
    keys, result = (key, value), None
    for i, hops in enumerate(_hops(steps)):
        # Sent first, so that the compiler hides it behind attention.
        following = _shift(keys, hops) if hops else keys
        result = _attend(
            query,
            keys,
            tables[:, i],
            out_dtype=out_dtype,
            implementation=implementation,
            previous=result,
        )
        keys = following
    assert result is not None
    out = result.out[0].astype(query.dtype)
    return out, Saved(query, key, value, Partial(out, result.lse[0]))


def _hops(steps: list[int]) -> list[int]:
    """How many ranks further keys go after each step; 0 after the last."""
    return [*np.diff(steps).tolist(), 0]


def _ring_backward(
    saved: Saved, tables: jax.Array, dout: jax.Array, *, steps: list[int], implementation: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of keys follow them one step later, so that attention hides them too, and return home."""
    delta, wide = _delta(saved, dout), accumulator_dtype(saved.query.dtype)
    gradients = functools.partial(
        _gradients, saved, dout=dout, delta=delta, dtype=wide, implementation=implementation
    )
    keys = (saved.key, saved.value)
    following = _shift(keys, _hops(steps)[0]) if len(steps) > 1 else keys
    dq, own = gradients(keys, tables[:, 0])
    travelling = None
    for i, (step, hops) in list(enumerate(zip(steps, _hops(steps), strict=True)))[1:]:
        keys = following
        following = _shift(keys, hops) if hops else keys
        more_dq, part = gradients(keys, tables[:, i])
        dq = dq + more_dq
        total = part if travelling is None else jax.tree.map(jnp.add, travelling, part)
        travelling = _shift(total, hops or -step)
    dkv = own if travelling is None else jax.tree.map(jnp.add, own, travelling)
    dk, dv = (x.astype(saved.key.dtype) for x in dkv)
    return dq.astype(saved.query.dtype), dk, dv


# --- all-gather ---


def _gather(key: jax.Array, value: jax.Array) -> KeyValue:
    return jax.lax.all_gather(key, AXIS, tiled=True), jax.lax.all_gather(value, AXIS, tiled=True)


def _gathered_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, tables: jax.Array, *, implementation: str | None
) -> tuple[jax.Array, Saved]:
    out, saved = _forward(query, *_gather(key, value), tables, implementation=implementation)
    return out, saved._replace(key=key, value=value)


def _gathered_backward(
    saved: Saved, tables: jax.Array, dout: jax.Array, *, implementation: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = accumulator_dtype(saved.query.dtype)
    dq, dkv = _gradients(
        saved,
        _gather(saved.key, saved.value),
        tables[:, 0],
        dout,
        _delta(saved, dout),
        dtype=wide,
        implementation=implementation,
    )
    dk, dv = (jax.lax.psum_scatter(x, AXIS, tiled=True).astype(saved.key.dtype) for x in dkv)
    return dq.astype(saved.query.dtype), dk, dv


# --- Ulysses ---


def _heads_for_tokens(x: jax.Array) -> jax.Array:
    """[T / cp, N, ...] of all heads to [T, N / cp, ...] of all tokens."""
    return jax.lax.all_to_all(x, AXIS, split_axis=1, concat_axis=0, tiled=True)


def _tokens_for_heads(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=1, tiled=True)


def _ulysses_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, tables: jax.Array, *, implementation: str | None
) -> tuple[jax.Array, Saved]:
    """What is saved are the heads that this rank computes, of all tokens."""
    query, key, value = map(_heads_for_tokens, (query, key, value))
    out, saved = _forward(query, key, value, tables, implementation=implementation)
    return _tokens_for_heads(out), saved


def _ulysses_backward(
    saved: Saved, tables: jax.Array, dout: jax.Array, *, implementation: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    gradients = _backward(saved, tables, _heads_for_tokens(dout), implementation=implementation)
    dq, dk, dv = map(_tokens_for_heads, gradients)
    return dq, dk, dv
