"""Messages of context_attention for arguments that do not fit."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import CollectiveOptions, ContextPlan, context_attention, masks, plan_context

from .harness import AXIS, make_mesh

PLAN = plan_context(masks.causal(32), 4, chunk_size=4)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp_size": 2}, "The plan is for cp_size=4, but mesh axis 'context' has size 2: build it with"),
        ({"axis_name": "ring"}, "axis_name='ring' is no axis of the mesh, which has ('context',)"),
        (
            {"length": 16},
            "query has 4 tokens (shape (4, 4, 8)), but the shards inside shard_map must have the 8 of",
        ),
        ({"plan": masks.causal(32)}, "plan must be a jaxmagi.ContextPlan, but it is AttnMask"),
        (
            {"plan": ContextPlan.stack([PLAN, PLAN])},
            "A plan stacked for (2,) sequences needs query [2, T, N, D] (or jax.vmap over both), but it has",
        ),
        ({"heads": (4, 3)}, "number of query heads 4 must be a multiple of the number of key heads 3"),
        (
            {"dtypes": (np.float32, jnp.bfloat16)},
            "query, key and value must have one dtype, but have float32, bfloat16, bfloat16",
        ),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap must be positive"),
        ({"scale": np.nan}, "scale must be finite in float32, or None for D**-0.5, but is nan"),
        ({"scale": True}, "scale must be a number, but it is True"),
        ({"deterministic": "no"}, "deterministic must be True or False, but it is 'no'"),
        ({"sinks": np.ma.zeros(4)}, "sinks must not be a masked array"),
        (
            {"collectives": CollectiveOptions(ranks_per_host=3)},
            "ranks_per_host=3 must divide the size 4 of mesh axis 'context', or be larger",
        ),
        ({"implementation": "cuda"}, "implementation must be one of"),
        ({"sinks": np.zeros(3)}, "sinks must have shape (4,)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with expect(message):
        run(**arguments)


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_traced_numbers(name: str) -> None:
    with expect(f"{name} is static, a number that gets compiled into the program, but it is traced"):
        jax.jit(lambda number: run(**{name: number}))(1.0)


@pytest.mark.parametrize(
    ("shape", "on_mesh", "message"),
    [
        (
            (32, 4, 8),
            False,
            "axis_name='context' is no axis of the mesh, which has (): call inside jax.shard_map",
        ),
        (
            (16, 4, 8),
            True,
            "query has 16 tokens (shape (16, 4, 8)), but the global arrays outside of shard_map",
        ),
        ((3,), True, "must all be [T, N, D] or all [B, T, N, D]"),
    ],
)
def test_bad_calls_outside(shape: tuple[int, ...], on_mesh: bool, message: str) -> None:
    x = jnp.zeros(shape)
    with jax.set_mesh(make_mesh(4)) if on_mesh else contextlib.nullcontext(), expect(message):
        context_attention(x, x, x, PLAN, axis_name=AXIS)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_batch_of_another_size_than_the_plans(batch: tuple[int, ...]) -> None:
    x, plans = jnp.zeros((*batch, 32, 4, 8)), ContextPlan.stack([PLAN, PLAN])
    with jax.set_mesh(make_mesh(4)), expect("A plan stacked for (2,) sequences needs query [2, T, N, D]"):
        context_attention(x, x, x, plans, axis_name=AXIS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("tensor"), "only its tokens may be, over 'context'"),
        (P(None, None, "tensor"), "only its tokens may be, over 'context'"),
        (P(None, AXIS), "query has its batch or heads sharded over 'context'"),
    ],
)
def test_explicit_shardings_that_cannot_work(spec: P, message: str) -> None:
    mesh = jax.make_mesh((2, 4), ("tensor", AXIS), axis_types=(AxisType.Explicit,) * 2)
    query = jax.device_put(np.zeros((32, 4, 8), np.float32), jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh), expect(message):
        context_attention(query, query, query, PLAN, axis_name=AXIS)


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
        ({"batch_axis_name": "data", "batch": ()}, "batch_axis_name='data' needs query [B, T, N, D]"),
    ],
)
def test_axes_that_cannot_work(options: dict[str, Any], message: str) -> None:
    options = dict(options)
    x = jnp.zeros((*options.pop("batch", (3,)), 32, 3, 8))
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), expect(message):
        context_attention(x, x, x, PLAN, axis_name=AXIS, **options)
