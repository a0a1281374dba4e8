"""Context attention on data x context meshes of four GPUs: "data" left to XLA's partitioner, or named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import ContextPlan, attention, context_attention, dispatch, masks, plan_context

from ..collectives.groups import assert_close, place, require_devices
from ..compiled import collective_names
from .harness import AXIS

pytestmark = pytest.mark.gpu

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 1024, 8, 2, 64
MASK = masks.documents([300, 700, 24])
BF16_TOLERANCE = 5e-2


def gradients(attend: Any, *operands: Any) -> Any:
    """Returns the output and the gradients of query, key and value."""
    *rows, dout = operands
    out, pull = jax.vjp(attend, *rows)
    return out, pull(dout)


@functools.cache
def problem() -> tuple[list[np.ndarray], ContextPlan, Any]:
    """Returns dispatched operands, the plan, and what one GPU makes of them, dispatched too."""
    rng = np.random.default_rng(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    operands = [rng.normal(size=(BATCH, LENGTH, n, DIM)).astype(jnp.bfloat16) for n in heads]
    plan = plan_context(MASK, 2, chunk_size=128)
    attend = functools.partial(attention, mask=MASK, implementation="ffi")
    want = jax.jit(functools.partial(gradients, attend))(*map(jnp.asarray, operands))
    order = functools.partial(dispatch, plan=plan, axis=1)
    return [*map(order, operands)], plan, jax.tree.map(lambda x: order(np.asarray(x)), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("by", ["partitioner", "arguments", "shard_map"])
def test_batch_beside_the_tokens(kind: AxisType, by: str) -> None:
    require_devices(4)
    operands, plan, want = problem()
    mesh = jax.make_mesh((2, 2), ("data", AXIS), (kind, kind), devices=jax.devices()[:4])
    options: dict[str, Any] = {"batch_axis_name": "data"} if by == "arguments" else {}

    attend: Any = functools.partial(context_attention, axis_name=AXIS, implementation="ffi", **options)
    if by == "shard_map":
        rows = P(None, AXIS)
        attend = jax.shard_map(attend, in_specs=(rows, rows, rows, P()), out_specs=rows, axis_names={AXIS})

    @jax.jit
    def run(plan: ContextPlan, *operands: Any) -> Any:
        return gradients(lambda *rows: attend(*rows, plan), *operands)

    with jax.set_mesh(mesh):
        placed = place(plan, mesh, P()), *place(operands, mesh, P("data", AXIS))
        compiled = run.lower(*placed).compile()
        got = compiled(*placed)
    assert not collective_names(compiled.as_text())  # rows travel by custom calls
    assert_close(got, want, BF16_TOLERANCE)
