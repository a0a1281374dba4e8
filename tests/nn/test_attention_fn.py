"""`attention_fn` inside the attention modules of nnx and linen."""

import functools
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jaxmagi
from jaxmagi import AttnMask, masks
from tests.cases import FP32_TOLERANCE

LENGTH, HEADS, WIDTH = 48, 4, 32


def module(attention_fn: Any = jaxmagi.nn.attention_fn, **options: Any) -> Any:
    """A layer whose parameters are the same on every call.

    Typed as Any, for Flax declares masks to be arrays.
    """
    return nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=WIDTH,
        decode=False,
        attention_fn=attention_fn,
        rngs=nnx.Rngs(0),
        **options,
    )


def linen_module(attention_fn: Any) -> Any:
    return linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)


def inputs(rng: np.random.Generator, *batch: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal((*batch, LENGTH, WIDTH), np.float32))


def dense(mask: AttnMask) -> jax.Array:
    """The mask as Flax wants it: bool [1, T, S]."""
    return jnp.asarray(mask.to_dense()[None])


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_nnx_agrees_with_flax_under_a_mask(
    rng: np.random.Generator, batch: tuple[int, ...], kv_heads: int | None
) -> None:
    mask, x = masks.documents([17, 30, 1]), inputs(rng, *batch)
    ours = module(num_kv_heads=kv_heads)(x, mask=mask)
    theirs = module(nnx.dot_product_attention, num_kv_heads=kv_heads)(x, mask=dense(mask))
    np.testing.assert_allclose(ours, theirs, atol=FP32_TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx_without_a_mask(rng: np.random.Generator, is_causal: bool) -> None:
    x = inputs(rng, 2)
    ours = module()(x, is_causal=is_causal)
    theirs = module(nnx.dot_product_attention)(x, is_causal=is_causal)
    np.testing.assert_allclose(ours, theirs, atol=FP32_TOLERANCE)


def test_nnx_with_a_mask_for_each_example(rng: np.random.Generator) -> None:
    each, x = [masks.documents([17, 31]), masks.sliding_window(LENGTH, 4)], inputs(rng, 2)
    ours = module()(x, mask=AttnMask.stack(each))
    theirs = module(nnx.dot_product_attention)(x, mask=jnp.stack([dense(mask) for mask in each]))
    np.testing.assert_allclose(ours, theirs, atol=FP32_TOLERANCE)


def test_nnx_gradients_agree_and_one_trace_takes_every_mask(rng: np.random.Generator) -> None:
    ours, theirs, x = module(), module(nnx.dot_product_attention), inputs(rng, 2)
    traces = 0

    @nnx.jit
    def gradients(layer: Any, x: jax.Array, mask: Any) -> Any:
        nonlocal traces
        traces += 1
        return nnx.grad(lambda layer: jnp.sum(layer(x, mask=mask) ** 2))(layer)

    for lengths in ([17, 31], [48], [1, 2, 45], [5, 5, 5, 33]):
        mask = masks.documents(lengths)
        got, want = (
            gradients(ours, x, mask),
            nnx.grad(lambda m, d: jnp.sum(m(x, mask=d) ** 2))(theirs, dense(mask)),
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-3, rtol=1e-4), got, want)
    assert traces == 1


def test_linen_agrees_with_flax_under_a_mask(rng: np.random.Generator) -> None:
    mask, x = masks.documents([17, 30, 1]), inputs(rng, 2)
    ours, theirs = linen_module(jaxmagi.nn.attention_fn), linen_module(linen.dot_product_attention)
    parameters = theirs.init(jax.random.key(0), x)
    np.testing.assert_allclose(
        ours.apply(parameters, x, mask=mask),
        theirs.apply(parameters, x, mask=dense(mask)),
        atol=FP32_TOLERANCE,
    )


def test_dtype_casts_the_inputs(rng: np.random.Generator) -> None:
    assert module(dtype=jnp.bfloat16)(inputs(rng, 2), mask=masks.causal(LENGTH)).dtype == jnp.bfloat16


def plans_of(each: list[AttnMask], cp_size: int) -> jaxmagi.ContextPlan:
    plans = [jaxmagi.plan_context(mask, cp_size, chunk_size=4, num_stages=1) for mask in each]
    return jaxmagi.ContextPlan.stack(plans)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_plan_on_a_data_by_context_mesh(rng: np.random.Generator, axis_type: AxisType, kind: str) -> None:
    """A batch with a plan for each sequence equals Flax on one device, forward and gradient."""
    each, x = [masks.documents([17, 30, 1]), masks.sliding_window(LENGTH, 5)], inputs(rng, 2)
    plan = plans_of(each, 4)
    mesh = jax.make_mesh((2, 4), ("data", "context"), (axis_type, axis_type))
    attention_fn = functools.partial(jaxmagi.nn.attention_fn, batch_axis_name="data")
    dispatched = jnp.stack([jaxmagi.dispatch(x[i], _plan(plan, i)) for i in range(2)])
    distributed, want = _losses(kind, attention_fn, x, jnp.stack([dense(mask) for mask in each]))
    with jax.set_mesh(mesh):
        placed = jax.device_put(dispatched, jax.NamedSharding(mesh, P("data", "context")))
        plan = jax.device_put(plan, jax.NamedSharding(mesh, P("data", "context")))
        got = jax.jit(jax.value_and_grad(distributed))(placed, plan)
    gradient = np.asarray(got[1])
    got_gradient = np.stack([jaxmagi.undispatch(gradient[i], _plan(plan, i)) for i in range(2)])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got_gradient, want[1], atol=1e-4)


def _plan(stacked: jaxmagi.ContextPlan, index: int) -> jaxmagi.ContextPlan:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], stacked)


def _losses(kind: str, attention_fn: Any, x: jax.Array, mask: jax.Array) -> tuple[Any, Any]:
    """The distributed loss as a function of (x, plan), and Flax's own loss and gradient."""
    if kind == "nnx":
        graph, state = nnx.split(module(attention_fn))
        reference = module(nnx.dot_product_attention)
        want = jax.value_and_grad(lambda x: jnp.sum(reference(x, mask=mask) ** 2))(x)
        return lambda x, plan: jnp.sum(nnx.merge(graph, state)(x, mask=plan) ** 2), want
    ours, reference = linen_module(attention_fn), linen_module(linen.dot_product_attention)
    parameters = reference.init(jax.random.key(0), x)
    want = jax.value_and_grad(lambda x: jnp.sum(reference.apply(parameters, x, mask=mask) ** 2))(x)
    return lambda x, plan: jnp.sum(ours.apply(parameters, x, mask=plan) ** 2), want


def test_options_reach_the_local_op(rng: np.random.Generator) -> None:
    """Scale, soft cap and sinks change the result as they do in `jaxmagi.attention`."""
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, LENGTH, HEADS, 8)), jnp.float32) for _ in range(3)
    )
    mask, sinks = masks.causal(LENGTH), jnp.arange(HEADS, dtype=jnp.float32)
    options: Any = {"scale": 0.3, "logits_soft_cap": 0.7, "sinks": sinks, "implementation": "xla"}
    for name in ("scale", "logits_soft_cap", "sinks"):
        one = {name: options[name]}
        got = jaxmagi.nn.attention_fn(query, key, value, mask=mask, **one)
        np.testing.assert_array_equal(got, jaxmagi.attention(query, key, value, mask, **one))
        assert np.abs(got - jaxmagi.attention(query, key, value, mask)).max() > 1e-3
    with pytest.raises(ValueError, match="implementation"):
        jaxmagi.nn.attention_fn(query, key, value, mask=mask, implementation="cudnn")
    text = str(jax.make_jaxpr(functools.partial(_gradient_of_sum, mask, True))(query, key, value))
    assert "deterministic=True" in text


def _gradient_of_sum(mask: AttnMask, deterministic: bool, query: Any, key: Any, value: Any) -> Any:
    def total(query: jax.Array) -> jax.Array:
        return jaxmagi.nn.attention_fn(
            query, key, value, mask=mask, deterministic_gradients=deterministic
        ).sum()

    return jax.grad(total)(query)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("placed", [False, True])
def test_options_reach_the_distributed_op(
    rng: np.random.Generator, axis_type: AxisType, placed: bool
) -> None:
    """Also axis_name and batch_axis_name, with gradients of the sinks, for arrays placed or not."""
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, LENGTH, HEADS, 8)), jnp.float32) for _ in range(3)
    )
    mask, sinks = masks.causal(LENGTH), jnp.arange(HEADS, dtype=jnp.float32)
    options: Any = {"scale": 0.3, "logits_soft_cap": 0.7}
    want = jax.grad(lambda s: (jaxmagi.attention(query, key, value, mask, sinks=s, **options) ** 2).sum())(
        sinks
    )
    plan = jaxmagi.plan_context(mask, 4, chunk_size=4, num_stages=2)
    arrays = [jaxmagi.dispatch(x, plan, axis=1) for x in (query, key, value)]
    mesh = jax.make_mesh((2, 4), ("rows", "ranks"), (axis_type, axis_type))
    attend = functools.partial(
        jaxmagi.nn.attention_fn, mask=plan, axis_name="ranks", batch_axis_name="rows", **options
    )
    with jax.set_mesh(mesh):
        if placed:
            arrays = [jax.device_put(x, jax.NamedSharding(mesh, P("rows", "ranks"))) for x in arrays]
        got = jax.jit(jax.grad(lambda s: (attend(*arrays, sinks=s) ** 2).sum()))(sinks)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


QKV = jnp.zeros((2, LENGTH, HEADS, 8))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bias": jnp.zeros((1, HEADS, LENGTH, LENGTH))}, NotImplementedError, "bias, got an array of shape"),
        (
            {"mask": jnp.ones((LENGTH, LENGTH), bool)},
            NotImplementedError,
            "got an array of shape .*dense masks",
        ),
        ({"dropout_rate": 0.1, "deterministic": False}, NotImplementedError, "dropout_rate=0.1"),
        ({"precision": "highest"}, NotImplementedError, "precision, got str"),
        ({"module": object()}, NotImplementedError, "module"),
        ({"input_positions": jnp.zeros(3)}, NotImplementedError, "input_positions"),
        ({"mask": masks.full(LENGTH), "is_causal": True}, ValueError, "is_causal=True with a mask"),
        ({"mask": masks.full(LENGTH), "batch_axis_name": "data"}, ValueError, "batch_axis_name='data'"),
        ({"mask": masks.full(LENGTH - 1)}, ValueError, f"{LENGTH - 1}.*{LENGTH}|{LENGTH}.*{LENGTH - 1}"),
    ],
)
def test_what_is_not_honoured_raises(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jaxmagi.nn.attention_fn(QKV, QKV, QKV, **arguments)


def test_causal_without_a_mask_needs_equal_lengths() -> None:
    with pytest.raises(NotImplementedError, match="48 queries and 47 keys"):
        jaxmagi.nn.attention_fn(QKV, QKV[:, 1:], QKV[:, 1:], is_causal=True)


def test_decoding_raises(rng: np.random.Generator) -> None:
    layer = module()
    layer.init_cache((2, LENGTH, WIDTH))
    with pytest.raises(NotImplementedError, match="decoding"):
        layer(inputs(rng, 2)[:, :1], decode=True)


@pytest.mark.parametrize(
    ("batch_axis_name", "batch", "message"),
    [
        ("dta", 2, "batch_axis_name='dta' must be mesh axes other than 'context'.*'data', 'context'"),
        ("context", 2, "batch_axis_name='context' must be mesh axes other than 'context'"),
        ("data", 3, "The batch 3 cannot be sharded over mesh axis 'data' of size 2"),
        ("data", None, "batch_axis_name='data' needs query .* has shape"),
    ],
)
def test_batch_axis_that_does_not_fit(batch_axis_name: str, batch: int | None, message: str) -> None:
    plan = jaxmagi.plan_context(masks.causal(LENGTH), 4)
    x = jnp.zeros((*(() if batch is None else (batch,)), LENGTH, HEADS, 8))
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "context"))), pytest.raises(ValueError, match=message):
        jaxmagi.nn.attention_fn(x, x, x, mask=plan, batch_axis_name=batch_axis_name)
