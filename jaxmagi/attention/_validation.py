"""Checks the arguments of `attention`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_one_of, is_traced, number
from .._dtypes import DTYPES, accumulator_dtype, is_positive_normal
from ..masks import AttnMask
from ..masks._validation import check_bands_type
from ._primitive import IMPLEMENTATIONS


def check_operands(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    implementation: str | None,
) -> None:
    """Raises ValueError, with the values, for arguments that do not fit together."""
    _check_shapes(query, key, value)
    _check_dtypes(query, key, value)
    _check_options(scale, soft_cap, implementation, accumulator_dtype(query.dtype))
    if sinks is not None:
        _check_sinks(sinks, query.shape[-2])


def check_mask(mask: AttnMask, query: jax.Array, key: jax.Array) -> None:
    """Raises ValueError unless ``mask`` is an `AttnMask` for these lengths."""
    check_mask_type(mask)
    _check_mask_fits(mask, query, key)


def check_mask_type(mask: Any) -> None:
    """Raises ValueError unless ``mask`` is an `AttnMask`, with bands of their dtype."""
    if isinstance(mask, AttnMask):
        return check_bands_type(mask.bands)
    given = type(mask).__name__
    if hasattr(mask, "shape"):
        given = f"an array of {mask.dtype}{list(mask.shape)}"
    raise ValueError(
        f"mask must be an AttnMask, but is {given}. Build one with jaxmagi.masks (masks.causal(q_len), "
        "masks.documents(lengths), masks.from_segment_ids(ids), ...) or with AttnMask.from_slices(q_ranges, "
        "k_ranges, mask_types); dense masks and None are not accepted."
    )


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must all be [T, N, D] or all [B, T, N, D], but are {shapes}.")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value must have one batch size, but the shapes are {shapes}.")
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(f"key and value must agree in length and heads, but the shapes are {shapes}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head dimension, but are {shapes}.")
    if 0 in (*query.shape[-2:], *key.shape[-2:], value.shape[-1]):
        raise ValueError(f"There must be heads, and dimensions of them, but the shapes are {shapes}.")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"The number of query heads {query.shape[-2]} must be a multiple of the number of key heads "
            f"{key.shape[-2]}."
        )


def _check_dtypes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    dtypes = [x.dtype.name for x in (query, key, value)]
    if len(set(dtypes)) > 1:
        raise ValueError(f"query, key and value must have one dtype, but have {', '.join(dtypes)}.")
    if dtypes[0] not in DTYPES:
        raise ValueError(f"The dtype must be one of {', '.join(DTYPES)}, but is {dtypes[0]}.")


def _check_mask_fits(mask: AttnMask, query: jax.Array, key: jax.Array) -> None:
    lengths = (query.shape[-3], key.shape[-3])
    if (mask.q_len, mask.kv_len) != lengths:
        raise ValueError(
            f"The mask has (q_len, kv_len) = {(mask.q_len, mask.kv_len)}, but query and key have lengths "
            f"{lengths}."
        )
    shape = np.shape(mask.bands)
    if len(shape) == 3 and query.shape[:-3] != shape[:1]:
        raise ValueError(
            f"Per-example bands {shape} need query [{shape[0]}, T, N, D], but it has shape {query.shape}."
        )


def _check_options(
    scale: float | None, soft_cap: float | None, implementation: str | None, dtype: jnp.dtype
) -> None:
    """Checks the static arguments, for logits of this dtype."""
    for name, given in (("scale", scale), ("logits_soft_cap", soft_cap)):
        if is_traced(given):
            raise ValueError(
                f"{name} is static, a number that gets compiled into the program, but it is traced: "
                f"{given}. Give a Python number, or make it a static argument of jax.jit."
            )
        if given is not None:
            number(given, name)
    if scale is not None and not abs(scale) <= float(jnp.finfo(dtype).max):
        raise ValueError(f"scale must be finite in {dtype.name}, or None for D**-0.5, but is {scale}.")
    if soft_cap is not None and not is_positive_normal(soft_cap):
        raise ValueError(
            "logits_soft_cap must be positive and a normal number of float32, or None for none, but is "
            f"{soft_cap}."
        )
    check_one_of("implementation", implementation, IMPLEMENTATIONS)


def _check_sinks(sinks: jax.Array, heads: int) -> None:
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), one per query head, but have {sinks.shape}.")
    if not np.issubdtype(sinks.dtype, np.floating) and sinks.dtype.name not in DTYPES:
        raise ValueError(f"sinks must be floating-point, but are {sinks.dtype.name}.")
