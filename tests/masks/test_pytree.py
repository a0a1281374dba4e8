"""Masks under jax transformations are arguments, not constants."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import attention, masks, plan_context, plan_contexts
from jaxmagi.attention import attention_reference, flops
from jaxmagi.masks import AttnMask


def _visible(mask: AttnMask) -> jax.Array:
    q, k = jnp.arange(mask.q_len)[None, :, None], jnp.arange(mask.kv_len)[None, None]
    q0, q1, k0, k1, lo, hi = jnp.asarray(mask.bands).T[:, :, None, None]
    inside = (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1)
    return (inside & (lo <= k - q) & (k - q <= hi)).any(0)


def test_one_trace_for_many_masks(rng: np.random.Generator) -> None:
    traces = 0

    @jax.jit
    def visible(mask: AttnMask) -> jax.Array:
        nonlocal traces
        traces += 1
        return _visible(mask)

    for _ in range(20):
        cuts = np.sort(rng.integers(0, 33, rng.integers(0, 7)))
        mask = masks.documents(np.diff(cuts, prepend=0, append=32))
        np.testing.assert_array_equal(visible(mask), mask.to_dense())
    assert traces == 1
    visible(masks.causal(32).pad_to(16))
    assert traces == 2


def test_structure_depends_on_lengths_and_shape_only() -> None:
    structure = jax.tree.structure(masks.causal(8))
    assert structure == jax.tree.structure(masks.documents([3, 5]))
    assert structure != jax.tree.structure(masks.causal(9))
    assert hash(structure) == hash(jax.tree.structure(masks.full(8)))


def test_vmap_over_stacked_masks() -> None:
    parts = [masks.causal(12), masks.documents([4] * 3), masks.block_causal(12, 5)]
    stacked = AttnMask.stack(parts)
    np.testing.assert_array_equal(jax.vmap(_visible)(stacked), stacked.to_dense())


def test_device_masks_have_host_methods() -> None:
    mask = jax.device_put(masks.documents([3, 5]))
    assert isinstance(mask.bands, jax.Array)
    assert (mask.area(), mask.num_bands) == (21, 2)
    assert AttnMask.concatenate([mask, mask]).area() == 42
    assert (mask & mask.crop().shift()).area() == 21
    np.testing.assert_array_equal(mask.pad_to(2).to_dense(), masks.documents([3, 5]).to_dense())


@pytest.mark.parametrize(
    "method",
    [
        AttnMask.area,
        AttnMask.to_dense,
        AttnMask.draw,
        lambda mask: mask.num_bands,
        lambda mask: mask.pad_to(9),
        lambda mask: AttnMask.concatenate([mask, mask]),
        lambda mask: AttnMask.stack([mask]),
        lambda mask: mask & masks.full(4),
        lambda mask: masks.full(4) | mask,
        lambda mask: mask.crop((0, 2)),
        lambda mask: masks.full(4).crop(keys=(0, mask.bands[0, 1])),
        lambda mask: mask.shift(1),
        lambda mask: masks.full(4).shift(mask.bands[0, 1]),
        lambda mask: AttnMask.from_bands(mask.bands, q_len=4, kv_len=4),
        lambda mask: masks.documents(mask.bands[:, 0]),
        lambda mask: masks.full(mask.bands[0, 0]),
        lambda mask: masks.documents([1, mask.bands[0, 1]]),
        lambda mask: masks.prefix_tree(mask.bands[:, 0], [1] * 8),
        lambda mask: masks.from_segment_ids([mask.bands[0, 0]]),
        lambda mask: AttnMask.from_bands([[0, 1, 0, 1, 0, mask.bands[0, 5]]], q_len=4, kv_len=4),
    ],
)
def test_traced_masks_say_so(method: Callable[[AttnMask], Any]) -> None:
    with pytest.raises(
        ValueError, match=r"is traced: masks (and plans )?are built (and inspected )?on the host"
    ):
        jax.jit(lambda mask: method(mask) and None)(masks.causal(4))


X = np.ones((300, 1, 1), np.float32)
HOST_METHODS = [
    AttnMask.area,
    AttnMask.to_dense,
    AttnMask.draw,
    lambda mask: mask.num_bands,
    lambda mask: mask.pad_to(9),
    lambda mask: AttnMask.concatenate([masks.causal(4), mask]),
    lambda mask: AttnMask.stack([mask]),
    lambda mask: flops(mask, 1, 1),
    lambda mask: attention_reference(X, X, X, mask),
    lambda mask: plan_context(mask, 2),
    lambda mask: plan_contexts([masks.causal(300), mask], 2),
]


@pytest.mark.parametrize("method", [*HOST_METHODS, lambda mask: attention(X, X, X, mask)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, np.int16, np.float32, np.int64])
def test_cast_masks_are_refused(dtype: Any, method: Callable[[AttnMask], Any]) -> None:
    """Their numbers are rounded: 257 is 256 in bfloat16, and 1 in int8."""
    mask = jax.tree.map(lambda x: np.asarray(x).astype(dtype), masks.documents([257, 43]))
    message = rf"bands of a mask must be int32\[\.\.\., S, 6\], .* are {np.dtype(dtype)}\[8, 6\]"
    with pytest.raises(ValueError, match=message):
        method(mask)


@pytest.mark.parametrize("method", HOST_METHODS)
@pytest.mark.parametrize(
    ("band", "message"),
    [
        ((0, 301, 0, 300, 0, 0), r"band 1: query range \(0, 301\) is not inside the 300 query tokens"),
        ((0, 300, 299, 512, 0, 300), r"band 1: key range \(299, 512\) is not inside the 300 key tokens"),
        ((0, 300, -1, 300, 0, 0), r"band 1: key range \(-1, 300\) is not inside"),
        ((5, 3, 0, 300, 0, 0), r"band 1: query range \(5, 3\) ends before it begins"),
    ],
)
def test_bands_outside_are_refused(
    band: tuple[int, ...], message: str, method: Callable[[AttnMask], Any]
) -> None:
    mask = AttnMask(np.array([[0, 9, 0, 9, 1, 1], band], np.int32), 300, 300)
    with pytest.raises(ValueError, match=message):
        method(mask)


@pytest.mark.parametrize("leaf", [None, object(), 3.5, "bands"])
def test_unflatten_does_not_validate(leaf: object) -> None:
    _, structure = jax.tree.flatten(masks.causal(4))
    mask = jax.tree.unflatten(structure, [leaf])
    assert mask.bands is leaf
    assert (mask.q_len, mask.kv_len) == (4, 4)


def test_masks_pass_through_grad_scan_and_eval_shape() -> None:
    mask = masks.causal(4)
    assert jax.eval_shape(lambda m: m, mask).bands.shape == (8, 6)

    def loss(x: jax.Array, mask: AttnMask) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry + jnp.where(_visible(mask), x, 0.0).sum(), None

        return jax.lax.scan(step, jnp.zeros(()), None, length=2)[0]

    gradient = jax.jit(jax.grad(loss))(jnp.ones((4, 4)), mask)
    np.testing.assert_array_equal(gradient, 2.0 * mask.to_dense())


def test_bands_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(masks.causal(4).bands)[0, 0] = 1
