"""Both passes of the kernels on the GPU, judged against fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagi.attention import attention

from .device_reference import Logits, Report, check, judge
from .gpu_harness import Shape, as_mask, default_logits, poison_masked
from .gradient_reference import Cotangents, Gradients, check_gradients, judge_gradients
from .helpers import Operands


@functools.lru_cache(maxsize=2)
def make_cotangents(shape: Shape) -> Cotangents:
    """Unit-normal cotangents of output and log-sum-exp."""
    rng = np.random.default_rng(1)
    rows = (shape.batch, shape.q_len, shape.heads)
    dout = jnp.asarray(rng.standard_normal((*rows, shape.v_dim), np.float32)).astype(shape.dtype)
    return Cotangents(dout, jnp.asarray(rng.standard_normal(rows, np.float32)))


def poison_both(operands: Operands, shape: Shape, poison: float) -> tuple[Operands, Cotangents]:
    """Puts ``poison`` into fully masked keys, values and queries, and into the cotangents of the latter."""
    poisoned, masked_queries = poison_masked(operands, poison)
    cotangents = make_cotangents(shape)
    return poisoned, cotangents._replace(out=jnp.where(masked_queries, poison, cotangents.out))


@functools.partial(jax.jit, static_argnames=("logits", "deterministic", "sm_margin"))
def gradients(
    operands: Operands,
    logits: Logits,
    cotangents: Cotangents,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[tuple[jax.Array, jax.Array], Gradients[jax.Array], jax.Array]:
    """Results and gradients of the public function, and the gradient of the sinks."""

    def op(
        query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return attention(
            query,
            key,
            value,
            as_mask(operands),
            scale=logits.scale,
            logits_soft_cap=logits.soft_cap or None,
            sinks=sinks,
            deterministic=deterministic,
            return_residual=True,
            implementation="ffi",
            sm_margin=sm_margin,
        )

    results, pull = jax.vjp(op, operands.query, operands.key, operands.value, operands.sinks)
    *tensors, dsinks = pull(tuple(cotangents))
    return results, Gradients(*tensors), dsinks


def run_and_check_both(
    operands: Operands,
    shape: Shape,
    logits: Logits | None = None,
    *,
    cotangents: Cotangents | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Report, Gradients[jax.Array]]:
    """Runs the kernels and asserts that results and gradients are right."""
    logits = logits or default_logits(operands)
    cotangents = cotangents or make_cotangents(shape)
    results, got, dsinks = gradients(operands, logits, cotangents, deterministic, sm_margin)
    report = judge(operands, logits, *results)
    check(report, operands.query.dtype)
    deviations, want_dsinks = judge_gradients(operands, logits, cotangents, got)
    check_gradients(deviations, operands.query.dtype)
    tolerance = 0.02 * np.abs(want_dsinks).max(initial=1)
    np.testing.assert_allclose(np.asarray(dsinks, np.float64), want_dsinks, rtol=0, atol=tolerance)
    return report, got
