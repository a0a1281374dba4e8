"""Registers how primitives run and are lowered: to custom calls where they fit, otherwise to plain JAX."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

type Function = Callable[..., Sequence[jax.Array]]
type LoweringRule = Callable[..., Any]
"""Lowers a primitive: called with a lowering context, operands and the primitive's parameters."""


class Compiled(NamedTuple):
    """Describes the compiled code of a primitive for one platform.

    Attributes:
        lower: lowers the primitive to custom calls.
        unsupported_reason: returns why a lowering context and parameters do not fit, None if they do.
        on_fallback: is called where plain JAX takes over although the user has not asked for it.
    """

    lower: LoweringRule
    unsupported_reason: Callable[..., str | None]
    on_fallback: Callable[[], None] = lambda: None


def run_compiled(primitive: Primitive, static: Sequence[str]) -> None:
    """Lets a primitive outside of ``jax.jit`` run as a program of its own, also under ``jax.disable_jit``.

    Args:
        primitive: the primitive, which has lowerings alone.
        static: the names of its parameters.
    """
    program = jax.jit(primitive.bind, static_argnames=static)

    @primitive.def_impl
    def run(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # without a program the primitive would run itself, without an end
            return program(*operands, **params)


def register(
    primitive: Primitive,
    portable: LoweringRule,
    compiled: Mapping[str, Compiled],
    implementation_of: Callable[[Mapping[str, Any]], str | None],
) -> None:
    """Registers the lowering rules of a primitive.

    Args:
        primitive: the primitive to lower.
        portable: lowers it to plain JAX, on any platform.
        compiled: its compiled code by platform.
        implementation_of: returns the implementation that the parameters ask for: None for what fits, "xla"
            for plain JAX, and any other name for compiled code.
    """
    mlir.register_lowering(primitive, _rule(primitive, portable, _MISSING, implementation_of))
    for platform, code in compiled.items():
        mlir.register_lowering(
            primitive, _rule(primitive, portable, code, implementation_of), platform=platform
        )


def _rule(
    primitive: Primitive,
    portable: LoweringRule,
    compiled: Compiled,
    implementation_of: Callable[[Mapping[str, Any]], str | None],
) -> LoweringRule:
    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        implementation = implementation_of(params)
        if implementation == "xla":
            return portable(ctx, *operands, **params)
        reason = compiled.unsupported_reason(ctx, **params)
        if reason is None:
            return compiled.lower(ctx, *operands, **params)
        if implementation is None:
            compiled.on_fallback()
            return portable(ctx, *operands, **params)
        raise _unsupported_error(ctx, primitive, implementation, reason)

    return rule


def no_kernel(*_: Any, **__: Any) -> str:
    """Returns the reason why compiled code cannot run where there is none."""
    return "there is no compiled code for it"


_MISSING = Compiled(no_kernel, no_kernel)


def _unsupported_error(
    ctx: mlir.LoweringRuleContext, primitive: Primitive, implementation: str, reason: str
) -> NotImplementedError:
    """Returns the error for a user whose choice of an implementation cannot run."""
    platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
    return NotImplementedError(
        f'implementation="{implementation}": {primitive.name} cannot run on platform {platforms}: {reason}. '
        'Use implementation="xla", or None for what fits.'
    )
