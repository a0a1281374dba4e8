"""vmap equals a loop, whatever it maps over."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi.attention import attention
from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE, random_bands

from .helpers import attend, make_inputs, max_error

SIZE, BATCH, Q, KV = 3, 2, 30, 40


def operands(rng: np.random.Generator, per_example: bool) -> dict[str, Any]:
    x = make_inputs(rng, batch=(SIZE, BATCH), q_len=Q, kv_len=KV, dim=8, v_dim=4)
    shape = (SIZE, BATCH, 4, 6) if per_example else (SIZE, 1, 4, 6)
    bands = np.stack([random_bands(rng, Q, KV, 4) for _ in range(shape[0] * shape[1])]).reshape(shape)
    return {
        "query": x.query,
        "key": x.key,
        "value": x.value,
        "bands": bands if per_example else bands[:, 0],
        "sinks": rng.standard_normal((SIZE, 4)).astype(np.float32),
    }


def make_op(implementation: str | None) -> Any:
    """Output, residual and gradients of query, key, value and sinks."""

    def op(query: Any, key: Any, value: Any, bands: Any, sinks: Any) -> Any:
        mask = AttnMask(bands, Q, KV)
        function = functools.partial(attend, mask=mask, implementation=implementation)
        (out, lse), pull = jax.vjp(function, query, key, value, sinks)
        return out, lse, pull((jnp.cos(out), jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse))))

    return op


def check(op: Any, arrays: dict[str, Any], mapped: tuple[str, ...], axis: int = 0) -> None:
    args = [y if name in mapped else y[0] for name, y in arrays.items()]
    moved = [np.moveaxis(y, 0, axis) if n in mapped else y for n, y in zip(arrays, args, strict=True)]
    got = jax.jit(jax.vmap(op, in_axes=[axis if name in mapped else None for name in arrays]))(*moved)
    one = jax.jit(op)
    for i in range(SIZE):
        want = one(*(y[i] if n in mapped else y for n, y in zip(arrays, args, strict=True)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert max_error(a[i], b) <= 5 * FP32_TOLERANCE


ALL = ("query", "key", "value", "bands", "sinks")


@pytest.mark.parametrize(
    "mapped",
    [ALL, ALL[:3], ("query",), ("key", "value"), ("bands",), ("sinks",), ("query", "bands")],
    ids="+".join,
)
@pytest.mark.parametrize("per_example", [False, True], ids=["shared", "per_example"])
def test_some_mapped(rng: np.random.Generator, mapped: tuple[str, ...], per_example: bool) -> None:
    """Batching is one rule for all implementations."""
    check(make_op(None), operands(rng, per_example), mapped)


def test_other_axes(rng: np.random.Generator) -> None:
    check(make_op(None), operands(rng, per_example=False), ALL[:3], axis=2)


def test_nested(rng: np.random.Generator, implementation: str) -> None:
    arrays = operands(rng, per_example=True)

    def op(query: Any, key: Any, value: Any, bands: Any) -> Any:
        return attention(query, key, value, AttnMask(bands, Q, KV), implementation=implementation)

    args = [arrays[name] for name in ("query", "key", "value", "bands")]
    got = jax.jit(jax.vmap(jax.vmap(op)))(*args)
    one = jax.jit(op)
    for i, j in itertools.product(range(SIZE), range(BATCH)):
        assert max_error(got[i, j], one(*(y[i, j] for y in args))) <= FP32_TOLERANCE


@pytest.mark.parametrize("mapped", [ALL, ALL[:3], ("sinks",)], ids="+".join)
def test_over_nothing(rng: np.random.Generator, implementation: str, mapped: tuple[str, ...]) -> None:
    """An axis of size 0, which vmap takes."""
    arrays = operands(rng, per_example=True)
    args = [x[:0] if name in mapped else x[0] for name, x in arrays.items()]
    op, axes = make_op(implementation), [0 if name in mapped else None for name in arrays]
    got = jax.jit(jax.vmap(op, in_axes=axes))(*args)
    like = jax.eval_shape(op, *(x[0] for x in arrays.values()))
    assert [x.shape for x in jax.tree.leaves(got)] == [(0, *x.shape) for x in jax.tree.leaves(like)]
