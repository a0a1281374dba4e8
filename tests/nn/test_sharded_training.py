"""Models with parameters and batches sharded over Auto axes, as in Flax's guides, train as on one device."""

from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmagi
from jaxmagi import masks

from ..compiled import collectives

BATCH, LENGTH, WIDTH, HEADS, STEPS = 4, 48, 32, 4, 4
MASK = masks.documents([17, 30, 1])
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
RULES = (("batch", "data"), ("heads", "tensor"), ("hidden", "tensor"), ("width", None))

type Apply = Callable[[Any, jax.Array], jax.Array]


def init(*axes: str | None) -> Any:
    """Returns an initializer of kernels, sharded if a mesh is in context."""
    kernel = nnx.initializers.lecun_normal()
    return kernel if jax.sharding.get_abstract_mesh().empty else nnx.with_partitioning(kernel, axes)


class NnxBlock(nnx.Module):
    """Attention and a feed-forward network, with the kernels of Megatron."""

    def __init__(self, rngs: nnx.Rngs):
        options: Any = {"use_bias": False, "rngs": rngs}
        kernels = {"kernel_init": init(None, "tensor", None), "out_kernel_init": init("tensor", None, None)}
        attend = {"attention_fn": jaxmagi.nn.attention_fn, "decode": False}
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, **kernels, **attend, **options)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=init(None, "tensor"), **options)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=init("tensor", None), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask: Any = MASK
        x = x + self.attention(x, mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


def logical(*axes: str) -> Any:
    """Returns an initializer with logical axes (in attention, those of the flattened kernel)."""
    return linen.with_logical_partitioning(linen.initializers.lecun_normal(), axes)


class LinenBlock(linen.Module):
    """`NnxBlock` with logical axes, which `RULES` map to those of the mesh."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attend = linen.MultiHeadDotProductAttention(
            HEADS,
            use_bias=False,
            kernel_init=logical("width", "heads"),
            out_kernel_init=logical("heads", "width"),
            attention_fn=jaxmagi.nn.attention_fn,
        )
        mask: Any = MASK
        x = linen.spmd.with_logical_constraint(x, ("batch", "length", "width"))
        x = x + attend(x, mask=mask)
        up = linen.Dense(4 * WIDTH, use_bias=False, kernel_init=logical("width", "hidden"))
        down = linen.Dense(WIDTH, use_bias=False, kernel_init=logical("hidden", "width"))
        return x + down(linen.gelu(up(x)))


def nnx_model(x: jax.Array) -> tuple[Any, Apply]:
    """Returns parameters, sharded if a mesh is in context, and the model."""
    del x
    graph, state = nnx.split(nnx.jit(lambda: NnxBlock(nnx.Rngs(0)))())
    return state, lambda state, x: nnx.merge(graph, state)(x)


def linen_model(x: jax.Array) -> tuple[Any, Apply]:
    """Returns parameters, sharded by `RULES` where a mesh is in context, and the model."""
    model = LinenBlock()

    def make() -> Any:
        return model.init(jax.random.key(0), x)

    specs = linen.get_partition_spec(jax.eval_shape(make))
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    layout = linen.spmd.logical_to_mesh(specs, RULES) if on_mesh else None
    parameters = linen.unbox(jax.jit(make, out_shardings=layout)())
    return parameters, lambda parameters, x: model.apply(parameters, x)  # pyright: ignore[reportReturnType]


MODELS = {"nnx": nnx_model, "linen": linen_model}


def train(kind: str, x: Any, target: Any) -> tuple[list[float], str | None, Any]:
    """Returns the losses, the compiled step and the parameters."""
    parameters, apply = MODELS[kind](x)

    def step(parameters: Any, optimizer: Any, x: jax.Array, target: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            return ((apply(parameters, x) - target) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, parameters)
        return optax.apply_updates(parameters, updates), optimizer, value

    operands: Any = (parameters, jax.jit(OPTIMIZER.init)(parameters))
    compiled = jax.jit(step).lower(*operands, x, target).compile()
    layout = compiled.input_shardings[0][:2]
    losses = []
    for _ in range(STEPS):
        *operands, loss = compiled(*jax.device_put(tuple(operands), layout), x, target)
        losses.append(float(loss))
    return losses, compiled.as_text(), operands[0]


@pytest.mark.parametrize("kind", MODELS)
def test_trains_as_on_one_device(kind: str, rng: np.random.Generator) -> None:
    x, target = jnp.asarray(rng.normal(size=(2, BATCH, LENGTH, WIDTH)).astype(np.float32))
    want, _, _ = train(kind, x, target)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), linen.logical_axis_rules(RULES):
        placed = (jax.device_put(y, NamedSharding(mesh, P("data"))) for y in (x, target))
        got, text, parameters = train(kind, *placed)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[-1] < got[0]
    specs = {leaf.sharding.spec[:2] for leaf in jax.tree.leaves(parameters)}
    assert {(None, "tensor"), ("tensor", None)} <= {(*spec, None)[:2] for spec in specs}
    assert {key.split()[0] for key in collectives(text)} == {"all-reduce"}
