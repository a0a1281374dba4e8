"""Counts the arithmetic of attention by the convention of the FlashAttention papers."""

from typing import Literal

from .._checks import integer
from ..masks import AttnMask
from ._validation import check_mask_type


def flops(mask: AttnMask, num_heads: int, head_dim: int, *, mode: Literal["fwd", "bwd"] = "fwd") -> int:
    """Returns the floating-point operations of attention: 4 · area · N · D, and backward 2.5 times that.

    Only visible cells count: two matrix products forward and five backward, with two operations for each
    multiply-add. Per-example masks count all their examples; a shared mask counts one.

    Args:
        mask: the mask, on the host.
        num_heads: N, the query heads.
        head_dim: D.
        mode: "fwd" or "bwd".

    Raises:
        ValueError: for another mode, what is no mask, or numbers that are no integers above zero.
    """
    products = {"fwd": 2, "bwd": 5}
    if mode not in tuple(products):
        raise ValueError(f'mode must be "fwd" or "bwd", but is {mode!r}.')
    check_mask_type(mask)
    heads, dim = (
        integer(value, name, minimum=1) for value, name in ((num_heads, "num_heads"), (head_dim, "head_dim"))
    )
    return products[mode] * 2 * mask.area() * heads * dim
