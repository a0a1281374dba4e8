"""How the primitives are lowered: to custom calls where they fit, else to plain JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._refusal import refusal
from ._groups import replica_groups
from ._partitioning import lower
from ._process import tell_memory_limits
from ._route import Route

type _Function = Callable[..., Sequence[jax.Array]]
type _Misfit = Callable[..., str | None]  # of operand types, cp_size, params: why no custom call
type _Rule = Callable[..., Any]


def register(primitive: Primitive, portable: _Function, compiled: _Function, misfit: _Misfit) -> None:
    """Registers the lowerings of a primitive.

    Args:
        primitive: what to lower.
        portable: the primitive in plain JAX.
        compiled: the primitive by custom calls for CUDA; gets the ``groups`` of devices too.
        misfit: why operand types, ``cp_size`` (ranks of a group) and params do not fit it; None if they do.
    """
    otherwise = _portable_rule(primitive, portable, misfit)
    mlir.register_lowering(primitive, _portable_rule(primitive, portable, _no_kernel))
    mlir.register_lowering(primitive, _cuda_rule(primitive, compiled, misfit, otherwise), platform="cuda")


def _portable_rule(primitive: Primitive, function: _Function, misfit: _Misfit) -> _Rule:
    """Lowers the function, unless something else was asked for."""

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, route: Route, **params: Any) -> Any:
        if route.implementation in (None, "xla"):
            return lower(ctx, primitive, function, "portable", *operands, route=route, **params)
        reason = misfit(ctx.avals_in, cp_size=_groups(ctx, route).shape[1], **params)
        raise refusal(ctx, primitive, route.implementation, reason)

    return rule


def _cuda_rule(primitive: Primitive, function: _Function, misfit: _Misfit, otherwise: _Rule) -> _Rule:
    """Lowers the function, which makes custom calls, where they fit and are not declined."""

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, route: Route, **params: Any) -> Any:
        groups = _groups(ctx, route)
        fits = misfit(ctx.avals_in, cp_size=groups.shape[1], **params) is None
        if route.implementation == "xla" or not fits:
            return otherwise(ctx, *operands, route=route, **params)
        tell_memory_limits()  # this process is likely to run the program
        # Functions to be lowered do not see the context.
        on_groups = functools.partial(function, groups=groups)
        return lower(ctx, primitive, on_groups, "compiled", *operands, route=route, **params)

    return rule


def _groups(ctx: mlir.LoweringRuleContext, route: Route) -> np.ndarray:
    """The devices that exchange rows: int64 [groups, ranks of each]."""
    groups = replica_groups(ctx, route.axis_name)
    return groups if route.group_size is None else groups.reshape(-1, route.group_size)


def _no_kernel(operands: Sequence[Any], **_: Any) -> str:
    del operands
    return "there is no compiled code for it"
