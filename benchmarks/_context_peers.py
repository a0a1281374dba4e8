"""Implements other ways to spread attention over ranks, each as well as it can be on our own local kernel.

All functions are of a rank's part, inside shard_map: queries [T, N, D], keys and values [S, K, D]. Partial
outputs, sums over steps and gradients that travel are in float32 (float64 for float64), as in ours. What a
mask hides from all ranks is known when a peer is made, and skipped.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks._jax_collectives import shift
from benchmarks._local_bands import stacked, visible, zigzag
from jaxmagi import AttnMask, context_attention, plan_context
from jaxmagi.attention import (
    Partial,
    accumulator_dtype,
    attention_backward,
    attention_forward,
    row_delta,
)
from jaxmagi.calibration._chain import AXIS

type KeyValue = tuple[Array, Array]
type Gradients = tuple[Array, Array, Array]
type Forward = tuple[Array, Saved]


class Method(NamedTuple):
    """A way to spread attention under one mask.

    Attributes:
        attend: of a rank's query, key, value and tables; differentiable.
        tables: arrays that lead with the ranks.
        tokens: int32 [cp, T], the tokens of each rank's queries, and of its keys where there are as many.
        key_rows: keys and values that a rank has.
    """

    attend: Callable[..., Array]
    tables: Any
    tokens: np.ndarray
    key_rows: int


type Maker = Callable[[AttnMask, int, str | None], Method]
"""Takes a mask, the number of ranks, and the implementation of the local kernel."""


def ours(mask: AttnMask, cp_size: int, implementation: str | None, *, keep_received: bool = False) -> Method:
    """Receives the keys that are needed, those of some heads while others compute."""
    plan = plan_context(mask, cp_size)
    attend = functools.partial(
        context_attention, axis_name=AXIS, implementation=implementation, keep_received=keep_received
    )
    return Method(attend, plan, np.asarray(plan.token_order).reshape(cp_size, -1), plan.shard_length)


def kernel_alone(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Runs the local kernel on the queries that ours gives to a rank, which has all keys: nothing is sent.

    This is not a way to spread attention, but the bound that such ways are compared with.
    """
    return _alone(_Local(implementation), mask, cp_size)


def kernel_alone_with_links(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Runs the same, and behind it an all-reduce of 1 MiB, after which links between GPUs stay awake.

    They draw some 6 % of the power then, which GPUs at their power limit take from the clock: so much slower
    is a kernel in a program that sends anything at all. The all-reduce itself takes some 20 us.
    """
    return _alone(_LocalWithLinks(implementation), mask, cp_size)


def ring(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Passes keys and values round, in the zigzag layout, while those that came before are attended to.

    Steps in which no rank sees anything are left out, of the way too.
    """
    tokens, bands = zigzag(mask.q_len, cp_size), np.asarray(mask.bands)
    # Table i of a rank is for the keys that come from i ranks before.
    tables = [
        [visible(bands, tokens[rank], tokens[rank - step]) for step in range(cp_size)]
        for rank in range(cp_size)
    ]
    steps = [step for step in range(cp_size) if step == 0 or any(len(row[step]) for row in tables)]
    tables = [[row[step] for step in steps] for row in tables]
    return _method(_Ring(implementation, steps), tables, tokens, mask.kv_len // cp_size)


def all_gather(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Gathers all keys and values, in the zigzag layout, and attends to them at once."""
    tokens = zigzag(mask.q_len, cp_size)
    tables = [[visible(np.asarray(mask.bands), queries, tokens.reshape(-1))] for queries in tokens]
    return _method(_Gathered(implementation), tables, tokens, mask.kv_len // cp_size)


def ulysses(mask: AttnMask, cp_size: int, implementation: str | None) -> Method:
    """Splits heads instead of tokens while attention runs, by all-to-alls before and after it.

    Needs key heads that the ranks divide.
    """
    tokens = np.arange(mask.q_len, dtype=np.int32).reshape(cp_size, -1)
    tables = [[np.asarray(mask.bands)]] * cp_size
    return _method(_Ulysses(implementation), tables, tokens, mask.kv_len // cp_size)


OURS, ALONE, ALONE_WITH_LINKS = "ours", "kernel alone", "kernel alone, links awake"
PEERS: dict[str, Maker] = {"ring": ring, "all-gather": all_gather, "Ulysses": ulysses}
METHODS: dict[str, Maker] = {
    OURS: ours,
    **PEERS,
    ALONE: kernel_alone,
    ALONE_WITH_LINKS: kernel_alone_with_links,
}


class Saved(NamedTuple):
    """Results of the forward pass that the backward pass needs."""

    query: Array
    key: Array
    value: Array
    result: Partial[Array]  # [T, N, D], in the dtype of query, and [T, N]


def _delta(saved: Saved, dout: Array) -> Array:
    return row_delta(saved.result, Partial(dout, jnp.zeros_like(saved.result.lse)))


class _Local:
    """Attention to the keys that a rank has, and what the other methods make of it."""

    def __init__(self, implementation: str | None) -> None:
        self.implementation = implementation

    def forward(self, query: Array, key: Array, value: Array, tables: Array) -> Forward:
        out, lse = self.attend(query, (key, value), tables[:, 0], query.dtype)
        return out[0], Saved(query, key, value, Partial(out[0], lse[0]))

    def backward(self, saved: Saved, tables: Array, dout: Array) -> Gradients:
        keys, delta = (saved.key, saved.value), _delta(saved, dout)
        dq, (dk, dv) = self.gradients(saved, keys, tables[:, 0], dout, delta, saved.query.dtype)
        return dq, dk, dv

    def attend(
        self,
        query: Array,
        keys: KeyValue,
        bands: Array,
        out_dtype: Any,
        previous: Partial[Array] | None = None,
    ) -> Partial[Array]:
        """Attends to some keys by bands [1, C, 6], and adds ``previous``, [1, T, N, D] and [1, T, N]."""
        out, lse = attention_forward(
            query[None],
            keys[0][None],
            keys[1][None],
            bands,
            jnp.full(query.shape[1], -jnp.inf, accumulator_dtype(query.dtype)),
            scale=query.shape[-1] ** -0.5,
            soft_cap=0,
            out_dtype=out_dtype,
            implementation=self.implementation,
            previous=previous,
        )
        return Partial(out, lse)

    def gradients(
        self, saved: Saved, keys: KeyValue, bands: Array, dout: Array, delta: Array, dtype: Any
    ) -> tuple[Array, KeyValue]:
        """Returns the gradients of the queries, and of some keys and values."""
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
            implementation=self.implementation,
        )
        return dq[0], (dk[0], dv[0])


class _LocalWithLinks(_Local):
    def forward(self, query: Array, key: Array, value: Array, tables: Array) -> Forward:
        out, saved = super().forward(query, key, value, tables)
        return _behind_all_reduce(out), saved

    def backward(self, saved: Saved, tables: Array, dout: Array) -> Gradients:
        dq, dk, dv = super().backward(saved, tables, dout)
        return _behind_all_reduce(dq), dk, dv


def _behind_all_reduce(result: Array) -> Array:
    """Returns the result as it is, when all GPUs have it and have sent each other 1 MiB."""
    first = (0,) * result.ndim
    # No two numbers are equal, so that the compiler cannot reduce one for all.
    sent = jnp.sin(jax.lax.iota(jnp.float32, 2**18) + result[first].astype(jnp.float32))
    total = jax.lax.psum(jax.lax.optimization_barrier(sent), AXIS)
    return result.at[first].add((0 * total[0]).astype(result.dtype))


def _alone(local: _Local, mask: AttnMask, cp_size: int) -> Method:
    tokens, keys = ours(mask, cp_size, local.implementation).tokens, np.arange(mask.kv_len)
    tables = [[visible(np.asarray(mask.bands), queries, keys)] for queries in tokens]
    return _method(local, tables, tokens, mask.kv_len)


def _method(
    local: _Local, tables: Sequence[Sequence[np.ndarray]], tokens: np.ndarray, key_rows: int
) -> Method:
    """Returns a differentiable method, by the two passes of ``local``."""
    attend = jax.custom_vjp(lambda *operands: local.forward(*operands)[0])

    def attend_fwd(query: Any, key: Any, value: Any, tables: Any) -> tuple[Array, Any]:
        out, saved = local.forward(query, key, value, tables)
        return out, (saved, tables)

    attend.defvjp(attend_fwd, lambda saved, dout: (*local.backward(saved[0], saved[1], dout), None))
    return Method(attend, stacked(tables), tokens, key_rows)


class _Ring(_Local):
    def __init__(self, implementation: str | None, steps: list[int]) -> None:
        super().__init__(implementation)
        self.steps = steps
        self.hops = [*np.diff(steps).tolist(), 0]  # how many ranks further keys go after each step

    def forward(self, query: Array, key: Array, value: Array, tables: Array) -> Forward:
        out_dtype = query.dtype if len(self.steps) == 1 else accumulator_dtype(query.dtype)
        keys, result = (key, value), None
        for i, hops in enumerate(self.hops):
            # Sent first, so that the compiler hides it behind attention.
            following = shift(keys, hops) if hops else keys
            result = self.attend(query, keys, tables[:, i], out_dtype, result)
            keys = following
        assert result is not None
        out = result.out[0].astype(query.dtype)
        return out, Saved(query, key, value, Partial(out, result.lse[0]))

    def backward(self, saved: Saved, tables: Array, dout: Array) -> Gradients:
        """Sends gradients of keys after them one step later, so that attention hides them too, and home."""
        delta, wide = _delta(saved, dout), accumulator_dtype(saved.query.dtype)
        gradients = functools.partial(self.gradients, saved, dout=dout, delta=delta, dtype=wide)
        keys = (saved.key, saved.value)
        following = shift(keys, self.hops[0]) if len(self.steps) > 1 else keys
        dq, local = gradients(keys, tables[:, 0])
        travelling = None
        for i, (step, hops) in list(enumerate(zip(self.steps, self.hops, strict=True)))[1:]:
            keys = following
            following = shift(keys, hops) if hops else keys
            more_dq, part = gradients(keys, tables[:, i])
            dq = dq + more_dq
            total = part if travelling is None else jax.tree.map(jnp.add, travelling, part)
            travelling = shift(total, hops or -step)
        dkv = local if travelling is None else jax.tree.map(jnp.add, local, travelling)
        dk, dv = (x.astype(saved.key.dtype) for x in dkv)
        return dq.astype(saved.query.dtype), dk, dv


_gather = functools.partial(jax.lax.all_gather, axis_name=AXIS, tiled=True)


class _Gathered(_Local):
    def forward(self, query: Array, key: Array, value: Array, tables: Array) -> Forward:
        out, saved = super().forward(query, _gather(key), _gather(value), tables)
        return out, saved._replace(key=key, value=value)

    def backward(self, saved: Saved, tables: Array, dout: Array) -> Gradients:
        keys, wide = (_gather(saved.key), _gather(saved.value)), accumulator_dtype(saved.query.dtype)
        dq, dkv = self.gradients(saved, keys, tables[:, 0], dout, _delta(saved, dout), wide)
        dk, dv = (jax.lax.psum_scatter(x, AXIS, tiled=True).astype(saved.key.dtype) for x in dkv)
        return dq.astype(saved.query.dtype), dk, dv


# [T / cp, N, ...] of all heads to [T, N / cp, ...] of all tokens, and back.
_exchange = functools.partial(jax.lax.all_to_all, axis_name=AXIS, tiled=True)
_heads_for_tokens = functools.partial(_exchange, split_axis=1, concat_axis=0)
_tokens_for_heads = functools.partial(_exchange, split_axis=0, concat_axis=1)


class _Ulysses(_Local):
    """Saves the heads that this rank computes, of all tokens."""

    def forward(self, query: Array, key: Array, value: Array, tables: Array) -> Forward:
        query, key, value = map(_heads_for_tokens, (query, key, value))
        out, saved = super().forward(query, key, value, tables)
        return _tokens_for_heads(out), saved

    def backward(self, saved: Saved, tables: Array, dout: Array) -> Gradients:
        dq, dk, dv = map(_tokens_for_heads, super().backward(saved, tables, _heads_for_tokens(dout)))
        return dq, dk, dv
