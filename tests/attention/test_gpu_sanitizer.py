"""Small runs of every kernel, for compute-sanitizer: it slows programs down too much for the other tests."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi.attention import Partial, attention_reference, attention_reference_vjp
from tests.cases import tile_edge_bands
from tests.sanitizer import memcheck

from .device_reference import Logits
from .gpu_harness import KERNEL_DIMS
from .gradient_harness import gradients
from .gradient_reference import Cotangents
from .helpers import Inputs, Operands, forward, make_inputs, max_error

pytestmark = pytest.mark.gpu

Q_LEN, KV_LEN = 205, 203
DIMS = [*KERNEL_DIMS, (40, 72)]


def problem(rng: np.random.Generator, dim: int, v_dim: int) -> tuple[Inputs, Operands]:
    """Ragged lengths, per-example bands, sinks, in bfloat16, and a group with two head sets."""
    x = make_inputs(rng, q_len=Q_LEN, kv_len=KV_LEN, heads=4, kv_heads=1, dim=dim, v_dim=v_dim)
    x = x._replace(
        **{name: jnp.asarray(getattr(x, name), jnp.bfloat16) for name in ("query", "key", "value", "dout")}
    )
    bands = np.zeros((2, 8, 6), np.int32)
    for example in bands:
        some = tile_edge_bands(rng, Q_LEN, KV_LEN, 8)
        example[: len(some)] = some
    return x, Operands(x.query, x.key, x.value, jnp.asarray(bands), jnp.asarray(x.sinks))


@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_sanitizer_subset_of_outputs(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """The second call has a soft cap and accumulates into the first result."""
    x, operands = problem(rng, dim, v_dim)
    out, lse = forward(operands, scale=0.1, out_dtype=jnp.float32)
    want_out, want_lse = attention_reference(*operands[:4], scale=0.1, sinks=x.sinks)
    assert max_error(out, want_out) <= 0.02 and max_error(lse, want_lse) <= 1e-4
    no_sinks = operands._replace(sinks=jnp.full_like(operands.sinks, -jnp.inf))
    _, again = forward(no_sinks, scale=0.1, soft_cap=8.0, out_dtype=jnp.float32, previous=Partial(out, lse))
    _, capped = attention_reference(*operands[:4], scale=0.1, logits_soft_cap=8.0)
    assert max_error(again, np.logaddexp(want_lse, capped)) <= 1e-4


@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_sanitizer_subset_of_gradients(rng: np.random.Generator, dim: int, v_dim: int) -> None:
    """The second run has a soft cap and is deterministic."""
    x, operands = problem(rng, dim, v_dim)
    cotangents = Cotangents(jnp.asarray(x.dout), jnp.asarray(x.dlse))
    for logits, deterministic in ((Logits(0.1), False), (Logits(0.1, 8.0), True)):
        _, got, dsinks = gradients(operands, logits, cotangents, deterministic)
        want = attention_reference_vjp(
            *operands[:4],
            x.dout,
            x.dlse,
            scale=logits.scale,
            logits_soft_cap=logits.soft_cap or None,
            sinks=x.sinks,
        )
        for mine, exact in zip((*got, dsinks), want, strict=True):
            assert max_error(mine, exact) <= 0.02 * max(1, np.abs(exact).max())


def test_memcheck_is_clean() -> None:
    report = memcheck(Path(__file__))
    assert f"{2 * len(DIMS)} passed" in report, report
