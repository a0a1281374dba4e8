"""What users get told by context_attention."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import ContextPlan, context_attention, masks, plan_context

from .harness import AXIS, make_mesh

PLAN = plan_context(masks.causal(32), 4, chunk_size=4, num_stages=1)


def run(
    plan: Any = PLAN,
    *,
    cp_size: int = 4,
    length: int = 32,
    heads: tuple[int, int] = (4, 2),
    dtypes: tuple[Any, Any] = (np.float32, np.float32),
    **options: Any,
) -> Any:
    """Traces a call inside shard_map."""
    query = np.zeros((length, heads[0], 8), dtypes[0])
    key = np.zeros((length, heads[1], 8), dtypes[1])

    def local(query: jax.Array, key: jax.Array) -> Any:
        return context_attention(query, key, key, plan, **{"axis_name": AXIS, **options})

    mapped = jax.shard_map(local, mesh=make_mesh(cp_size), in_specs=P(AXIS), out_specs=P(AXIS))
    return jax.eval_shape(mapped, query, key)


def expect(message: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(message))


def test_the_call_itself_is_right() -> None:
    assert run().shape == (32, 4, 8)


def test_plan_for_other_ranks() -> None:
    with expect("The plan is for cp_size=4, but mesh axis 'context' has size 2: build it with"):
        run(cp_size=2)


def test_unknown_axis() -> None:
    with expect("axis_name='ring' is no axis of the mesh, which has ('context',)"):
        run(axis_name="ring")
    x = jnp.zeros((32, 4, 8))
    with expect(
        "axis_name='context' is no axis of the mesh, which has (): call inside jax.shard_map over it, or set"
    ):
        context_attention(x, x, x, PLAN, axis_name=AXIS)


def test_wrong_shard_length() -> None:
    message = (
        "query has 4 tokens (shape (4, 4, 8)), but the shards inside shard_map must have the 8 of the plan"
    )
    with expect(message):
        run(length=16)


def test_wrong_global_length() -> None:
    x = jnp.zeros((16, 4, 8))
    message = (
        "query has 16 tokens (shape (16, 4, 8)), but the global arrays outside of shard_map must have the 32"
    )
    with jax.set_mesh(make_mesh(4)), expect(message):
        context_attention(x, x, x, PLAN, axis_name=AXIS)


def test_no_plan() -> None:
    with expect("plan must be a jaxmagi.ContextPlan, but it is AttnMask"):
        run(masks.causal(32))


def test_stacked_plan() -> None:
    with expect(
        "A plan stacked for (2,) sequences needs query [2, T, N, D] (or jax.vmap over both), but it has shape"
    ):
        run(ContextPlan.stack([PLAN, PLAN]))


def test_checks_of_the_local_op() -> None:
    with expect("The number of query heads 4 must be a multiple of the number of key heads 3"):
        run(heads=(4, 3))
    with expect("query, key and value must have one dtype, but have float32, bfloat16, bfloat16"):
        run(dtypes=(np.float32, jnp.bfloat16))
    with expect("logits_soft_cap must be positive"):
        run(logits_soft_cap=-1.0)
    with expect("scale must be finite, or None for D**-0.5, but is nan"):
        run(scale=np.nan)
    for name in ("scale", "logits_soft_cap"):
        with expect(f"{name} is static, a number that gets compiled into the program, but it is traced"):
            jax.jit(lambda number, name=name: run(**{name: number}))(1.0)
    with expect("implementation must be one of"):
        run(implementation="cuda")
    with expect("sinks must have shape (4,)"):
        run(sinks=jnp.zeros(3))
    with jax.set_mesh(make_mesh(4)), expect("must all be [T, N, D] or all [B, T, N, D]"):
        context_attention(jnp.zeros(3), jnp.zeros(3), jnp.zeros(3), PLAN, axis_name=AXIS)


def test_explicit_shardings_that_cannot_work() -> None:
    mesh = jax.make_mesh((2, 4), ("tensor", AXIS), axis_types=(AxisType.Explicit,) * 2)

    def call(spec: P) -> Any:
        query = jax.device_put(np.zeros((32, 4, 8), np.float32), jax.NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            return context_attention(query, query, query, PLAN, axis_name=AXIS)

    with expect("only its tokens may be, over 'context'"):
        call(P("tensor"))
    with expect("only its tokens may be, over 'context'"):
        call(P(None, None, "tensor"))
    with expect("query has its batch or heads sharded over 'context'"):
        call(P(None, AXIS))


MISNAMED = "must be mesh axes other than 'context', which is for the tokens; the mesh has ('data', 'context')"
TWICE = "A mesh axis can shard one dimension, and once: batch is over"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_axis_name": "dta"}, f"batch_axis_name='dta' {MISNAMED}"),
        ({"head_axis_name": ("data", "tensor")}, f"head_axis_name=('data', 'tensor') {MISNAMED}"),
        ({"batch_axis_name": AXIS}, f"batch_axis_name='context' {MISNAMED}"),
        ({"head_axis_name": ("data", AXIS)}, f"head_axis_name=('data', 'context') {MISNAMED}"),
        ({"batch_axis_name": "data", "head_axis_name": "data"}, f"{TWICE} 'data' and heads are over 'data'"),
        ({"batch_axis_name": ("data", "data")}, f"{TWICE} ('data', 'data')"),
        ({"head_axis_name": "data"}, "The number of query heads 3 cannot be sharded over mesh axis 'data'"),
        ({"batch_axis_name": "data"}, "The batch 3 cannot be sharded over mesh axis 'data' of size 2"),
    ],
)
def test_axes_that_cannot_work(options: dict[str, Any], message: str) -> None:
    x = jnp.zeros((3, 32, 3, 8))
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), expect(message):
        context_attention(x, x, x, PLAN, axis_name=AXIS, **options)


def test_a_batch_axis_without_a_batch() -> None:
    x = jnp.zeros((32, 4, 8))
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), expect("batch_axis_name='data' needs query [B, T, N, D]"):
        context_attention(x, x, x, PLAN, axis_name=AXIS, batch_axis_name="data")
