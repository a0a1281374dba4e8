"""Lowers the collectives to custom calls for CUDA where they fit, otherwise to plain JAX."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _lowering
from .._lowering import Compiled, Function
from ._groups import replica_groups
from ._partitioning import lower
from ._process import set_memory_limits
from ._route import Route


def register(
    primitive: Primitive,
    portable: Function,
    compiled: Function,
    unsupported_reason: Callable[..., str | None],
) -> None:
    """Registers the lowerings of a primitive.

    Args:
        primitive: the primitive to lower. Its parameters have a ``route``.
        portable: computes it in plain JAX.
        compiled: computes it by custom calls for CUDA; it also gets the ``groups`` of devices.
        unsupported_reason: returns why custom calls do not fit operand types and parameters; None if they
            do.
    """

    def reason(ctx: mlir.LoweringRuleContext, **params: Any) -> str | None:
        return unsupported_reason(ctx.avals_in, **params)

    def lower_portable(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        return lower(ctx, primitive, portable, "portable", *operands, **params)

    def lower_compiled(ctx: mlir.LoweringRuleContext, *operands: Any, route: Route, **params: Any) -> Any:
        set_memory_limits()
        # A function that is lowered does not get the context.
        on_groups = functools.partial(compiled, groups=groups_of(ctx, route))
        return lower(ctx, primitive, on_groups, "compiled", *operands, route=route, **params)

    _lowering.register(
        primitive,
        lower_portable,
        {"cuda": Compiled(lower_compiled, reason)},
        lambda params: params["route"].implementation,
    )


def groups_of(ctx: mlir.LoweringRuleContext, route: Route) -> np.ndarray:
    """Returns the devices that exchange rows, int64 [groups, ranks of each]."""
    groups = replica_groups(ctx, route.axis_name)
    return groups if route.group_size is None else groups.reshape(-1, route.group_size)
