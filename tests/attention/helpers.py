"""Inputs, compiled attention and comparisons, shared by the tests of attention."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from numpy.typing import ArrayLike, NDArray

from jaxmagi.attention import (
    attention,
    attention_backward,
    attention_forward,
    attention_reference,
    attention_reference_vjp,
)
from jaxmagi.masks import AttnMask

# Most tests have one size, to share compiled programs: unequal lengths that fill no block.
Q_LEN, KV_LEN, CAPACITY = 150, 170, 16


class Inputs(NamedTuple):
    """Operands and cotangents of attention."""

    query: Any
    key: Any
    value: Any
    sinks: Any
    dout: Any
    dlse: Any

    def replace_with(self, function: Callable[[Any], Any]) -> "Inputs":
        return Inputs(*map(function, self))


class Operands(NamedTuple):
    """Operands of attention, with a batch axis, or something for each of them."""

    query: Any  # [B, T, N, D]
    key: Any  # [B, S, K, D]
    value: Any  # [B, S, K, Dv]
    bands: Any  # int32[1 or B, C, 6]
    sinks: Any  # float32[N], -inf for none


class Results(NamedTuple):
    """Results and gradients of attention."""

    out: Any
    lse: Any
    query: Any
    key: Any
    value: Any
    sinks: Any


def make_inputs(
    rng: np.random.Generator,
    *,
    batch: tuple[int, ...] = (2,),
    q_len: int = Q_LEN,
    kv_len: int = KV_LEN,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int = 24,
    dtype: Any = np.float32,
) -> Inputs:
    """Unit-normal inputs; lse and its cotangent are never narrower than float32."""

    def normal(*shape: int, dtype: Any = dtype) -> NDArray[Any]:
        return np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))

    wide = np.float64 if dtype == np.float64 else np.float32
    return Inputs(
        query=normal(*batch, q_len, heads, dim),
        key=normal(*batch, kv_len, kv_heads, dim),
        value=normal(*batch, kv_len, kv_heads, v_dim),
        sinks=normal(heads, dtype=wide),
        dout=normal(*batch, q_len, heads, v_dim),
        dlse=normal(*batch, q_len, heads, dtype=wide),
    )


@functools.partial(jax.jit, static_argnames=("with_sinks", "options"))
def _run(inputs: Inputs, mask: AttnMask, with_sinks: bool, options: tuple[tuple[str, Any], ...]) -> Results:
    def attend(query: Any, key: Any, value: Any, sinks: Any) -> tuple[jax.Array, jax.Array]:
        sinks = sinks if with_sinks else None
        return attention(query, key, value, mask, sinks=sinks, return_residual=True, **dict(options))

    (out, lse), pull = jax.vjp(attend, *inputs[:4])
    return Results(out, lse, *pull((inputs.dout, inputs.dlse)))


def run(inputs: Inputs, mask: AttnMask, *, with_sinks: bool = False, **options: Any) -> Results:
    """Results and gradients of attention, compiled once per shape and options."""
    results = _run(inputs, mask, with_sinks, tuple(sorted(options.items())))
    return Results(*map(np.asarray, results))


def run_reference(inputs: Inputs, mask: AttnMask, *, with_sinks: bool = False, **options: Any) -> Results:
    """Results and gradients of the fp64 reference on the host."""
    sinks = inputs.sinks if with_sinks else None
    operands = (inputs.query, inputs.key, inputs.value, mask)
    out, lse = attention_reference(*operands, sinks=sinks, **options)
    gradients = attention_reference_vjp(*operands, inputs.dout, inputs.dlse, sinks=sinks, **options)
    return Results(out, lse, *gradients)


def forward(operands: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    """`attention_forward` of a sequence of operands, by default with a scale of dim**-0.5."""
    query = operands[0]
    defaults = {"scale": query.shape[-1] ** -0.5, "soft_cap": 0.0, "out_dtype": query.dtype}
    return attention_forward(*operands, **(defaults | {"implementation": "ffi"} | options))


def backward(operands: Any, **options: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`attention_backward` of a sequence of operands, by default with a scale of dim**-0.5."""
    query = operands[0]
    defaults = {"scale": query.shape[-1] ** -0.5, "soft_cap": 0.0, "grad_dtype": query.dtype}
    others = {"deterministic": False, "implementation": "ffi"}
    return attention_backward(*operands, **(defaults | others | options))


def attend(
    query: Any, key: Any, value: Any, sinks: Any, *, mask: AttnMask, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of attention."""
    return attention(
        query, key, value, mask, sinks=sinks, return_residual=True, implementation=implementation
    )


def score(out: jax.Array, lse: jax.Array) -> jax.Array:
    """A number that depends on all results."""
    return (out * jnp.cos(out)).sum() + jnp.sin(lse).sum()


def gradients(attend: Callable[..., Any]) -> Any:
    """The gradients of `score`, and results, of a function of query, key, value and sinks; compiled."""

    def loss(*operands: Any) -> Any:
        results = attend(*operands)
        return score(*results), results

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))


def max_error(got: ArrayLike, want: ArrayLike) -> float:
    """The largest absolute difference; infinities and NaN must be the same."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    return float(np.abs(got[finite] - want[finite]).max(initial=0.0))


def assert_close(got: Results, want: Results, tolerance: float) -> None:
    """Every field within ``tolerance``, relative to the field's scale where that is above 1."""
    for name, a, b in zip(Results._fields, got, want, strict=True):
        b = np.asarray(b, np.float64)
        scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
        error = max_error(a, b) / scale
        assert error <= tolerance, f"{name}: error {error:.3g} > {tolerance:.3g}"


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=_holds_jaxpr):
            if _holds_jaxpr(parameter):
                yield from equations(getattr(parameter, "jaxpr", parameter))


def _holds_jaxpr(x: Any) -> bool:
    """True for a jaxpr, closed or not."""
    return isinstance(getattr(x, "jaxpr", x), Jaxpr)


def count_primitives(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """The numbers of the two primitives of attention in the jaxpr of ``function``."""
    names = [e.primitive.name for e in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    return {direction: names.count(f"jaxmagi_attention_{direction}") for direction in ("forward", "backward")}
