"""`attention_fn` inside the attention modules of nnx and linen."""

import functools
import re
import subprocess
import sys
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jaxmagi
from jaxmagi import AttnMask, CollectiveOptions, masks

from ..cases import FP32_TOLERANCE

LENGTH, HEADS, WIDTH = 48, 4, 32


def module(attention_fn: Any = jaxmagi.nn.attention_fn, **options: Any) -> Any:
    """Returns a layer with the same parameters on every call, typed as Any as Flax wants arrays as masks."""
    layer = functools.partial(nnx.MultiHeadAttention, HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    return layer(attention_fn=attention_fn, **options)


def linen_module(attention_fn: Any = jaxmagi.nn.attention_fn) -> Any:
    """Returns the counterpart of `module` in linen, with its parameters bound."""
    layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    variables = linen.MultiHeadDotProductAttention(HEADS).init(
        jax.random.key(0), jnp.zeros((2, LENGTH, WIDTH))
    )
    return lambda x, mask: layer.apply(variables, x, mask=mask)


# Each kind of module has a layer with a given attention_fn, and Flax's own.
MODULES = {"nnx": (module, nnx.dot_product_attention), "linen": (linen_module, linen.dot_product_attention)}


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def inputs(rng: np.random.Generator, *batch: int) -> jax.Array:
    return normal(rng, *batch, LENGTH, WIDTH)


def dense(mask: AttnMask) -> jax.Array:
    """Returns the mask as Flax takes it: bool [..., 1, T, S]."""
    return jnp.expand_dims(jnp.asarray(mask.to_dense()), -3)


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
    theirs = module(nnx.dot_product_attention)(x, mask=dense(AttnMask.stack(each)))
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
        got = gradients(ours, x, mask)
        want = nnx.grad(lambda m, d: jnp.sum(m(x, mask=d) ** 2))(theirs, dense(mask))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-3, rtol=1e-4), got, want)
    assert traces == 1


def test_linen_agrees_with_flax_under_a_mask(rng: np.random.Generator) -> None:
    mask, x = masks.documents([17, 30, 1]), inputs(rng, 2)
    theirs = linen_module(linen.dot_product_attention)(x, dense(mask))
    np.testing.assert_allclose(linen_module()(x, mask), theirs, atol=FP32_TOLERANCE)


def test_dtype_casts_the_inputs(rng: np.random.Generator) -> None:
    assert module(dtype=jnp.bfloat16)(inputs(rng, 2), mask=masks.causal(LENGTH)).dtype == jnp.bfloat16


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("kind", MODULES)
def test_plan_on_a_data_by_context_mesh(rng: np.random.Generator, axis_type: AxisType, kind: str) -> None:
    """A batch with a plan for each sequence agrees with Flax on one device, also in the gradient."""
    each, x = [masks.documents([17, 30, 1]), masks.sliding_window(LENGTH, 5)], inputs(rng, 2)
    plans = [jaxmagi.plan_context(mask, 4, chunk_size=4) for mask in each]
    make, flax_attention = MODULES[kind]
    ours = make(functools.partial(jaxmagi.nn.attention_fn, batch_axis_name="data"))
    theirs = make(flax_attention)
    want = jax.value_and_grad(lambda x: jnp.sum(theirs(x, mask=dense(AttnMask.stack(each))) ** 2))(x)
    mesh = jax.make_mesh((2, 4), ("data", "context"), (axis_type, axis_type))
    dispatched = jnp.stack([jaxmagi.dispatch(one, plan) for one, plan in zip(x, plans, strict=True)])
    with jax.set_mesh(mesh):
        operands = jax.device_put(
            (dispatched, jaxmagi.ContextPlan.stack(plans)), jax.NamedSharding(mesh, P("data", "context"))
        )
        loss, gradient = jax.jit(jax.value_and_grad(lambda x, plan: jnp.sum(ours(x, mask=plan) ** 2)))(
            *operands
        )
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    for got, plan, expected in zip(np.asarray(gradient), plans, want[1], strict=True):
        np.testing.assert_allclose(jaxmagi.undispatch(got, plan), expected, atol=1e-4)


def test_options_reach_the_local_op(rng: np.random.Generator) -> None:
    """Scale, soft cap and sinks change the result as they do in `jaxmagi.attention`."""
    query, key, value = (normal(rng, 2, LENGTH, HEADS, 8) for _ in range(3))
    mask, sinks = masks.causal(LENGTH), jnp.arange(HEADS, dtype=jnp.float32)
    options: Any = {"scale": 0.3, "logits_soft_cap": 0.7, "sinks": sinks, "implementation": "xla"}
    for name in ("scale", "logits_soft_cap", "sinks"):
        one = {name: options[name]}
        got = jaxmagi.nn.attention_fn(query, key, value, mask=mask, **one)
        np.testing.assert_array_equal(got, jaxmagi.attention(query, key, value, mask, **one))
        assert np.abs(got - jaxmagi.attention(query, key, value, mask)).max() > 1e-3
    with pytest.raises(ValueError, match="implementation"):
        jaxmagi.nn.attention_fn(query, key, value, mask=mask, implementation="cudnn")
    one = functools.partial(jaxmagi.nn.attention_fn, mask=mask, deterministic_gradients=True)
    one = functools.partial(one, sm_margin=11)
    text = str(jax.make_jaxpr(jax.grad(lambda *rows: one(*rows).sum()))(query, key, value))
    assert "deterministic=True" in text and text.count("sm_margin=11") == 2


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("placed", [False, True])
def test_options_reach_the_distributed_op(
    rng: np.random.Generator, axis_type: AxisType, placed: bool
) -> None:
    """The options include axis_name and batch_axis_name; gradients of the sinks are compared."""
    query, key, value = (normal(rng, 2, LENGTH, HEADS, 8) for _ in range(3))
    mask, sinks = masks.causal(LENGTH), jnp.arange(HEADS, dtype=jnp.float32)
    options: Any = {"scale": 0.3, "logits_soft_cap": 0.7}
    alone = functools.partial(jaxmagi.attention, query, key, value, mask, **options)
    want = jax.grad(lambda s: (alone(sinks=s) ** 2).sum())(sinks)
    plan = jaxmagi.plan_context(mask, 4, chunk_size=4)
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


def test_collectives_reach_the_distributed_op() -> None:
    """In both passes."""
    options = CollectiveOptions(num_sms=7, timeout=1.5)
    attend = functools.partial(jaxmagi.nn.attention_fn, mask=PLAN, collectives=options, keep_received=True)
    with jax.set_mesh(jax.make_mesh((4,), ("context",))):
        text = str(jax.make_jaxpr(jax.grad(lambda *rows: attend(*rows).sum()))(QKV, QKV, QKV))
    routes = re.findall(r"num_sms=(\d+).*?timeout=([\w.]+)", text, re.DOTALL)
    assert set(routes) == {("7", "1.5")} and len(routes) == 2, routes
    assert text.count("keeps_received=True") == 2


QKV = jnp.zeros((2, LENGTH, HEADS, 8))
PLAN = jaxmagi.plan_context(masks.causal(LENGTH), 4, chunk_size=4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bias": jnp.zeros((1, HEADS, LENGTH, LENGTH))}, NotImplementedError, "bias, got an array of shape"),
        ({"mask": jnp.ones((LENGTH, LENGTH), bool)}, NotImplementedError, "an array of shape .*dense masks"),
        ({"dropout_rate": 0.1, "deterministic": False}, NotImplementedError, "dropout_rate=0.1"),
        ({"precision": "highest"}, NotImplementedError, "precision, got str"),
        ({"module": object()}, NotImplementedError, "module"),
        ({"input_positions": jnp.zeros(3)}, NotImplementedError, "input_positions"),
        ({"mask": masks.full(LENGTH), "is_causal": True}, ValueError, "is_causal=True with a mask"),
        ({"mask": masks.full(LENGTH), "batch_axis_name": "data"}, ValueError, "batch_axis_name='data'"),
        (
            {"mask": masks.full(LENGTH), "collectives": CollectiveOptions(num_sms=7)},
            ValueError,
            "num_sms=7.* goes with a ContextPlan",
        ),
        (
            {"mask": masks.full(LENGTH), "keep_received": True},
            ValueError,
            "keep_received=True goes with a ContextPlan",
        ),
        ({"dropout_rate": np.nan}, ValueError, "dropout_rate must be between 0 and 1, but it is nan"),
        ({"dropout_rate": -0.1}, ValueError, "dropout_rate must be between 0 and 1, but it is -0.1"),
        ({"dropout_rate": "0.1"}, ValueError, "dropout_rate must be a number, but it is '0.1'"),
        (
            {"dropout_rate": 0.1, "deterministic": "no"},
            ValueError,
            "deterministic must be True or False, but it is 'no'",
        ),
        ({"is_causal": "no"}, ValueError, "is_causal must be True or False, but it is 'no'"),
        (
            {"deterministic_gradients": 2},
            ValueError,
            "deterministic_gradients must be True or False, but it is 2",
        ),
        ({"mask": PLAN, "sm_margin": 9}, ValueError, "sm_margin=9 goes with an AttnMask"),
        ({"mask": masks.full(LENGTH - 1)}, ValueError, f"{LENGTH - 1}.*{LENGTH}|{LENGTH}.*{LENGTH - 1}"),
    ],
)
def test_unsupported_arguments_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jaxmagi.nn.attention_fn(QKV, QKV, QKV, **arguments)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_masked_arrays_raise(name: str) -> None:
    operands: Any = dict.fromkeys(("query", "key", "value"), QKV) | {name: np.ma.array(QKV)}
    with pytest.raises(ValueError, match=f"{name} must not be a masked array"):
        jaxmagi.nn.attention_fn(**operands)


@pytest.mark.parametrize("shape", [(), (LENGTH,), (LENGTH, HEADS)])
def test_too_few_axes_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"must be [*batch, T, N, D], but it has shape {shape}")):
        x = np.zeros(shape, np.float32)
        jaxmagi.nn.attention_fn(x, x, x)


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


def test_jaxmagi_is_imported_without_flax() -> None:
    program = "import sys, jaxmagi; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
