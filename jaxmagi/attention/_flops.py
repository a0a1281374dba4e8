"""Counts the arithmetic of attention by the convention of the FlashAttention papers."""

from typing import Literal

from ..masks import AttnMask


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
        ValueError: for another mode.
    """
    products = {"fwd": 2, "bwd": 5}
    if mode not in products:
        raise ValueError(f'mode must be "fwd" or "bwd", but is {mode!r}.')
    return products[mode] * 2 * mask.area() * num_heads * head_dim
