"""Splits collectives over mesh axes that a shard_map leaves to XLA's partitioner, which would gather rows.

A transfer treats all elements of a row alike, so every dimension but the rows may be split: a device
exchanges its part of the rows with the same parts of its peers.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._lowering import Function
from .._partitioning import (
    Partition,
    ShardingRule,
    Tiled,
    Tiles,
    is_partitioned,
    lower_partitioned,
    make_rule,
)
from ._process import timeout_ms

_ROWS = 1  # the dimension of rows of an array [G, rows, ...]


def lower(
    ctx: mlir.LoweringRuleContext,
    primitive: Primitive,
    function: Function,
    variant: Literal["portable", "compiled"],
    /,
    *operands: Any,
    **params: Any,
) -> Any:
    """Lowers a primitive, which is split over devices where the program is.

    Args:
        ctx: the context of the lowering rule.
        primitive: a cast or a reduction, or a half of one, which is never split (`OneStep._is_async`).
        function: computes the primitive on one device.
        variant: the implementation that ``function`` is.
        operands: the operands of the lowering rule.
        params: the parameters of the primitive.
    """
    if not is_partitioned(ctx):
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands, **params)
    return lower_partitioned(
        ctx,
        operands,
        bind=functools.partial(primitive.bind, **params),
        rule=_rule([x.ndim for x in ctx.avals_out]),
        choose=functools.partial(_choose, functools.partial(function, **params)),
        identity=(primitive.name, variant, params, timeout_ms(params["route"].timeout)),
    )


def _rule(ranks: Sequence[int]) -> ShardingRule:
    """Returns how shardings propagate from arrays of these ranks to the results."""
    others = [[f"x{i}d{dim}" for dim in range(_ROWS + 1, rank)] for i, rank in enumerate(ranks)]
    arrays, results = ([["g", rows, *dims] for dims in others] for rows in ("rows", "out_rows"))
    tables = [["g", "sends", "send_numbers"], ["g", "receives", "receive_numbers"]]
    return make_rule([*arrays, *tables], results, is_replicated=lambda factor: factor[0] not in "gx")


def _choose(function: Function, operands: Sequence[Tiled], results: Sequence[Tiled]) -> Partition:
    """Splits each array like its operand or its result, whichever is cut into more tiles."""
    *xs, sends, receives = operands
    tiles = [
        max(map(_even_tiles, pair), key=lambda tiles: tiles.total) for pair in zip(xs, results, strict=True)
    ]
    transfers = [x.keep(0) for x in tiles]
    # All arrays have to split the transfers G alike, as their tables are split.
    if any(not _are_equal(x, transfers[0]) for x in transfers):
        tiles = [_along(x, range(2, len(x.counts))) for x in tiles]
        transfers = [x.keep(0) for x in tiles]
    tables = [transfers[0].embed(len(x.shape), (0,)) for x in (sends, receives)]
    return Partition(function, [*tiles, *tables], tiles)


def _even_tiles(x: Tiled) -> Tiles:
    """Returns the tiles along all dimensions but the rows, as far as all are of one size."""
    return _along(x.tiles, x.even([i for i in range(len(x.shape)) if i != _ROWS]))


def _along(tiles: Tiles, dims: Sequence[int]) -> Tiles:
    """Returns the tiles of an array of the same rank that is cut along these dimensions alone."""
    return tiles.keep(*dims).embed(len(tiles.counts), dims)


def _are_equal(a: Tiles, b: Tiles) -> bool:
    """Returns whether each tile is on the same devices."""
    return np.array_equal(np.sort(a.devices, axis=-1), np.sort(b.devices, axis=-1))
