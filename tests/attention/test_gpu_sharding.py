"""Batch and heads over two GPUs by XLA's partitioner: kernels on their parts, against one GPU with all."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import masks
from jaxmagi.attention import attention

from ..collectives.groups import assert_close, place, require_devices
from ..compiled import collective_names

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HEADS, DIM = 2, 1024, 8, 64
MASK = masks.documents([300, 700, 24])
BF16_TOLERANCE = 2e-2


@jax.jit
def gradients(*operands: Any) -> Any:
    """Returns out and lse, and the gradients of query, key, value and sinks."""
    *rows, dout = operands

    def attend(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return attention(query, key, value, MASK, sinks=sinks, return_residual=True, implementation="ffi")

    results, pull = jax.vjp(attend, *rows)
    return results, pull((dout, jnp.sin(results[1])))


def inputs(rng: np.random.Generator, kv_heads: int) -> list[np.ndarray]:
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    *rows, dout = (rng.normal(size=(BATCH, LENGTH, n, DIM)).astype(jnp.bfloat16) for n in heads)
    return [*rows, rng.normal(size=HEADS).astype(np.float32), dout]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("rows", "kv_heads", "sends"),
    [
        (P("x"), 2, {"all-reduce"}),  # the gradient of the sinks
        (P(None, None, "x"), 2, set()),
        (P(None, None, "x"), 1, {"all-reduce"}),  # the gradients of the shared key head
    ],
    ids=["batch", "heads", "one_key_head"],
)
def test_two_gpus(rows: P, kv_heads: int, sends: set[str], kind: AxisType, rng: np.random.Generator) -> None:
    require_devices(2)
    operands = inputs(rng, kv_heads)
    want = jax.tree.map(np.asarray, gradients(*map(jnp.asarray, operands)))
    mesh = jax.make_mesh((2,), ("x",), (kind,), devices=jax.devices()[:2])
    keys = rows if kv_heads > 1 or rows == P("x") else P()
    specs = (rows, keys, keys, P(*rows[2:]), rows)
    with jax.set_mesh(mesh):
        placed = [place(x, mesh, spec) for x, spec in zip(operands, specs, strict=True)]
        compiled = gradients.lower(*placed).compile()
        got = compiled(*placed)
    assert collective_names(compiled.as_text()).keys() == sends
    scale = max(1.0, *(float(np.abs(x.astype(np.float32)).max()) for x in jax.tree.leaves(want)))
    assert_close(got, want, BF16_TOLERANCE * scale)


def test_two_layers_have_one_plan(rng: np.random.Generator) -> None:
    """The tiles of a mask are planned once on each device, for all layers."""
    require_devices(2)
    query, key, value, _, _ = inputs(rng, 2)
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    attend = functools.partial(attention, mask=MASK, implementation="ffi")

    def layers(query: Any, key: Any, value: Any) -> jax.Array:
        return attend(attend(query, key, value), key, value)

    with jax.set_mesh(mesh):
        placed = [place(x, mesh, P(None, None, "x")) for x in (query, key, value)]
        text = jax.jit(layers).lower(*placed).compile().as_text()
    assert text is not None
    calls = [f'custom_call_target="jaxmagi_attention_{name}"' for name in ("tile_schedule", "forward")]
    assert [text.count(call) for call in calls] == [1, 2]
