"""What a user is told whose choice of an implementation cannot run."""

from jax.extend.core import Primitive
from jax.interpreters import mlir


def refusal(
    ctx: mlir.LoweringRuleContext, primitive: Primitive, implementation: str | None, reason: str | None
) -> NotImplementedError:
    """The error of a lowering rule, to be raised."""
    platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
    return NotImplementedError(
        f'implementation="{implementation}": {primitive.name} cannot run on platform {platforms}: {reason}. '
        'Use implementation="xla", or None for what fits.'
    )
