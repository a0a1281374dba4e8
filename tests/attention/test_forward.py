"""Output and residual against the fp64 reference, for masks, dtypes, shapes and options."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import _tiles, attention, attention_reference, flops
from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE, FP64_TOLERANCE, MaskCase, mask_cases, random_bands

from .helpers import (
    CAPACITY,
    KV_LEN,
    Q_LEN,
    assert_close,
    forward,
    make_inputs,
    max_error,
    run,
    run_reference,
)

SMALL_CASES = [case for case in mask_cases() if max(case.q_len, case.kv_len) <= 400]
LARGE_CASES = [case for case in mask_cases() if 400 < max(case.q_len, case.kv_len) <= 1024]


def random_mask(rng: np.random.Generator, count: int = 9) -> AttnMask:
    bands = random_bands(rng, Q_LEN, KV_LEN, count)
    return AttnMask.from_bands(bands, q_len=Q_LEN, kv_len=KV_LEN, check=False).pad_to(CAPACITY)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_public_masks(rng: np.random.Generator, implementation: str, case: MaskCase) -> None:
    mask = case.mask(400).pad_to(CAPACITY)
    x = make_inputs(rng, batch=(), q_len=400, kv_len=400, heads=2, kv_heads=1)
    assert_close(run(x, mask, implementation=implementation), run_reference(x, mask), FP32_TOLERANCE)


def test_bands_outside(rng: np.random.Generator, implementation: str) -> None:
    """Nothing outside of the lengths counts, whoever made the bands."""
    far = np.iinfo(np.int32).max
    bands = [[-70, 30, -80, 40, -9, far], [30, 600, 60, 700, -far - 1, 40], [200, 400, 0, 170, -far, far]]
    inside = [[0, 30, 0, 40, -9, 2**30], [30, Q_LEN, 60, KV_LEN, -(2**30), 40]]
    made = AttnMask(np.array(bands, np.int32), Q_LEN, KV_LEN)
    mask = AttnMask.from_bands(inside, q_len=Q_LEN, kv_len=KV_LEN)
    x = make_inputs(rng)
    for with_sinks in (False, True):
        got = run(x, made, with_sinks=with_sinks, implementation=implementation)
        assert_close(got, run_reference(x, mask, with_sinks=with_sinks), FP32_TOLERANCE)


@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_public_masks_of_many_blocks(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: MaskCase
) -> None:
    """No other test has these shapes, so none finds a program compiled with these blocks."""
    monkeypatch.setattr(_tiles, "_MAX_BLOCK", 128)
    mask = case.mask(1024).pad_to(CAPACITY)
    x = make_inputs(rng, batch=(), q_len=1024, kv_len=1024, heads=1, kv_heads=1)
    assert_close(run(x, mask, implementation="xla"), run_reference(x, mask), FP32_TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"with_sinks": True},
        {"logits_soft_cap": 1.5, "scale": 0.3},
        {"logits_soft_cap": 0.8, "with_sinks": True},
    ],
)
def test_random_masks(rng: np.random.Generator, implementation: str, options: dict[str, Any]) -> None:
    for _ in range(4):
        x, mask = make_inputs(rng), random_mask(rng)
        got = run(x, mask, implementation=implementation, **options)
        assert_close(got, run_reference(x, mask, **options), FP32_TOLERANCE)


def test_per_example_masks(rng: np.random.Generator, implementation: str) -> None:
    empty = AttnMask.from_bands(np.zeros((0, 6), np.int32), q_len=Q_LEN, kv_len=KV_LEN)
    mask = AttnMask.stack([random_mask(rng), masks.causal(Q_LEN, KV_LEN), empty, random_mask(rng)])
    x = make_inputs(rng, batch=(4,))
    got = run(x, mask, with_sinks=True, implementation=implementation)
    assert_close(got, run_reference(x, mask, with_sinks=True), FP32_TOLERANCE)


@pytest.mark.parametrize("parents", [[-1, 0, 1, 1, 0, 4, -1, 6], [-1, 0, 0, 1, 2, 3, 4, -1]])
def test_prefix_trees(rng: np.random.Generator, implementation: str, parents: list[int]) -> None:
    """Segments in depth-first order, and two branches segment by segment."""
    mask = masks.prefix_tree(parents, [40, 21, 9, 0, 23, 17, 25, 15]).pad_to(CAPACITY)
    assert mask.q_len == Q_LEN
    x = make_inputs(rng, kv_len=Q_LEN)
    assert_close(run(x, mask, implementation=implementation), run_reference(x, mask), FP32_TOLERANCE)


def test_overlapping_bands_count_each_time(rng: np.random.Generator, implementation: str) -> None:
    bands = np.concatenate([random_bands(rng, Q_LEN, KV_LEN, 5) for _ in range(3)])
    bands[0] = bands[5] = (0, Q_LEN, 0, KV_LEN, -40, 40)
    mask = AttnMask.from_bands(bands, q_len=Q_LEN, kv_len=KV_LEN, check=False).pad_to(CAPACITY)
    x = make_inputs(rng)
    assert_close(run(x, mask, implementation=implementation), run_reference(x, mask), FP32_TOLERANCE)


@pytest.mark.parametrize("heads, kv_heads, dim, v_dim", [(3, 3, 8, 8), (6, 2, 24, 5), (4, 1, 5, 64)])
def test_head_shapes(
    rng: np.random.Generator, implementation: str, heads: int, kv_heads: int, dim: int, v_dim: int
) -> None:
    x = make_inputs(rng, batch=(), heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
    mask = random_mask(rng)
    got = run(x, mask, implementation=implementation)
    assert_close(got, run_reference(x, mask), FP32_TOLERANCE)


@pytest.mark.parametrize("q_len, kv_len", [(1, 700), (513, 512)])
def test_lengths(rng: np.random.Generator, implementation: str, q_len: int, kv_len: int) -> None:
    x = make_inputs(rng, batch=(), q_len=q_len, kv_len=kv_len)
    mask = masks.causal(q_len, kv_len)
    assert_close(run(x, mask, implementation=implementation), run_reference(x, mask), FP32_TOLERANCE)


def test_float64(rng: np.random.Generator, implementation: str, x64: None) -> None:
    for _ in range(3):
        x, mask = make_inputs(rng, dtype=np.float64), random_mask(rng)
        got = run(x, mask, with_sinks=True, implementation=implementation)
        assert got.lse.dtype == np.float64
        assert_close(got, run_reference(x, mask, with_sinks=True), FP64_TOLERANCE)


def dense_attention(query: jax.Array, key: jax.Array, value: jax.Array, dense: jax.Array) -> jax.Array:
    """jax.nn.dot_product_attention, which on CPU has no float16: there, the same computation by hand."""
    if query.dtype != jnp.float16:
        return jax.nn.dot_product_attention(query, key, value, mask=dense)
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(jnp.where(dense, logits * query.shape[-1] ** -0.5, -jnp.inf), axis=-1)
    out = jnp.einsum("bnts,bsnd->btnd", p.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return out.astype(value.dtype)


@functools.partial(jax.jit, static_argnames="implementation")
def _half_results(x: Any, mask: AttnMask, dense: jax.Array, implementation: str | None) -> tuple[Any, ...]:
    def op(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if implementation is None:
            return dense_attention(query, key, value, dense)
        return attention(query, key, value, mask, implementation=implementation)

    out, pull = jax.vjp(op, *x[:3])
    return out, *pull(x.dout)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_good_as_jax_nn(
    rng: np.random.Generator, implementation: str, dtype: Any
) -> None:
    x = make_inputs(rng, v_dim=16, dtype=dtype)
    mask = masks.sliding_window(Q_LEN, 40, 30, kv_len=KV_LEN)
    exact = run_reference(x._replace(dlse=np.zeros_like(x.dlse)), mask)
    dense = jnp.asarray(mask.to_dense())[None, None]
    got = _half_results(x, mask, dense, implementation)
    with jax.numpy_dtype_promotion("standard"):
        others = _half_results(x, mask, dense, None)
    wanted = (exact.out, exact.query, exact.key, exact.value)
    for ours, other, want in zip(got, others, wanted, strict=True):
        assert ours.dtype == dtype
        assert max_error(ours, want) <= 2 * max_error(other, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_options(rng: np.random.Generator, implementation: str, dtype: Any) -> None:
    x, mask = make_inputs(rng, dtype=dtype), random_mask(rng)
    options = {"with_sinks": True, "logits_soft_cap": 2.0}
    got = run(x, mask, implementation=implementation, **options)
    assert (got.out.dtype, got.lse.dtype) == (dtype, np.float32)
    want = run_reference(x, mask, **options)
    assert max_error(got.lse, want.lse) <= FP32_TOLERANCE
    assert_close(got, want, 16 * float(jnp.finfo(dtype).eps))


def test_masked_rows(rng: np.random.Generator, implementation: str) -> None:
    mask = AttnMask.from_bands([[20, 60, 5, 50, -3, 9]], q_len=Q_LEN, kv_len=KV_LEN).pad_to(CAPACITY)
    masked = ~mask.to_dense().any(axis=1)
    assert masked.any() and not masked.all()
    for with_sinks in (False, True):
        got = run(make_inputs(rng), mask, with_sinks=with_sinks, implementation=implementation)
        assert (got.out[:, masked] == 0).all()
        assert np.isneginf(got.lse[:, masked]).all() and np.isfinite(got.lse[:, ~masked]).all()


def test_empty_mask(rng: np.random.Generator, implementation: str) -> None:
    mask = AttnMask.from_bands(np.zeros((0, 6), np.int32), q_len=Q_LEN, kv_len=KV_LEN).pad_to(CAPACITY)
    got = run(make_inputs(rng), mask, with_sinks=True, implementation=implementation)
    assert np.isneginf(got.lse).all()
    assert all((x == 0).all() for x in got._replace(lse=np.zeros(1)))


def test_no_bands(rng: np.random.Generator, implementation: str) -> None:
    """Bands of capacity 0, shared and per example."""
    x = make_inputs(rng).replace_with(jnp.asarray)
    for examples in (1, 2):
        no_bands = jnp.zeros((examples, 0, 6), jnp.int32)
        out, lse = forward((*x[:3], no_bands, x.sinks), implementation=implementation)
        assert not np.any(out)
        assert np.isneginf(lse).all()


def test_huge_logits(rng: np.random.Generator, implementation: str) -> None:
    x, mask = make_inputs(rng), random_mask(rng)
    x = x._replace(query=100 * x.query)
    got, want = run(x, mask, implementation=implementation), run_reference(x, mask)
    assert max_error(got.out, want.out) <= 1e-3
    assert max_error(got.lse, want.lse) <= 1e-3


def test_residual_merges_parts_of_the_keys(rng: np.random.Generator, implementation: str) -> None:
    x, mask = make_inputs(rng), masks.full(Q_LEN, KV_LEN).pad_to(CAPACITY)
    cut = 70
    halves = [
        AttnMask.from_bands([[0, Q_LEN, *keys, -(2**30), 2**30]], q_len=Q_LEN, kv_len=KV_LEN).pad_to(CAPACITY)
        for keys in ((0, cut), (cut, KV_LEN))
    ]
    whole, first, second = (run(x, one, implementation=implementation) for one in (mask, *halves))
    lse = np.logaddexp(first.lse, second.lse)
    out = sum(np.exp(part.lse - lse)[..., None] * part.out for part in (first, second))
    assert max_error(lse, whole.lse) <= FP32_TOLERANCE
    assert max_error(out, whole.out) <= FP32_TOLERANCE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_accumulator_dtype_results(rng: np.random.Generator, implementation: str, dtype: Any) -> None:
    x, mask = make_inputs(rng, dtype=dtype), random_mask(rng)
    wide = functools.partial(forward, out_dtype=jnp.float32, implementation=implementation)
    out, lse = jax.jit(wide)((*x[:3], mask.bands[None], jnp.full(4, -jnp.inf)))
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    # The operands are exact; only the probabilities are rounded to their dtype.
    want, _ = attention_reference(*x[:3], mask)
    assert max_error(out, want) <= (FP32_TOLERANCE if dtype == jnp.float32 else 0.02)


def test_layout_without_batch(rng: np.random.Generator, implementation: str) -> None:
    x, mask = make_inputs(rng, batch=(1,)), random_mask(rng)
    flat = [y[0] for y in x[:3]]
    op = jax.jit(functools.partial(attention, return_residual=True, implementation=implementation))
    out, lse = op(*flat, mask)
    batched_out, batched_lse = op(*x[:3], mask)
    np.testing.assert_array_equal(batched_out[0], out)
    np.testing.assert_array_equal(batched_lse[0], lse)


def test_many_bands(rng: np.random.Generator, implementation: str) -> None:
    lengths = [3] * 500
    mask = masks.documents(lengths)
    x = make_inputs(rng, batch=(), q_len=1500, kv_len=1500, heads=1, kv_heads=1)
    got = run(x, mask, implementation=implementation)
    assert_close(got, run_reference(x, mask), FP32_TOLERANCE)


def test_portable_memory_is_linear_in_length() -> None:
    """131072 tokens in documents of 2048: a dense fp32 matrix would take 64 GiB."""
    mask = masks.documents([2048] * 64)
    x = jax.ShapeDtypeStruct((131072, 1, 64), jnp.float32)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, mask: AttnMask) -> jax.Array:
        return attention(query, key, value, mask, implementation="xla").sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, mask).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 8 * 131072 * 64 * 4


def test_flops() -> None:
    mask = masks.documents([5, 7])
    area = 5 * 6 // 2 + 7 * 8 // 2
    assert flops(mask, 3, 16) == 4 * area * 3 * 16
    assert flops(mask, 3, 16, mode="bwd") == 10 * area * 3 * 16
    with pytest.raises(ValueError, match="'both'"):
        flops(mask, 3, 16, mode="both")  # pyright: ignore[reportArgumentType]
