"""Both passes of context_attention over random operands, each as a program of its own and in one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmagi import ContextPlan, context_attention

from .harness import AXIS, make_mesh


class Passes:
    """Compiled passes over random bfloat16 operands in dispatched order, on a device for each rank."""

    def __init__(
        self, plan: ContextPlan, length: int, *, heads: int, kv_heads: int, dim: int, **options: Any
    ) -> None:
        """Makes the operands, and runs the passes once.

        Args:
            plan: for all ranks.
            length: the number of tokens.
            heads: the number of query heads.
            kv_heads: the number of key heads.
            dim: of queries, keys and values.
            options: of `context_attention`.
        """
        self._mesh = make_mesh(plan.cp_size)
        sharding = NamedSharding(self._mesh, P(AXIS))
        *self._operands, self._dout = (
            jax.device_put(
                jax.random.normal(jax.random.key(seed), (length, count, dim), jnp.bfloat16), sharding
            )
            for seed, count in enumerate((heads, kv_heads, kv_heads, heads))
        )

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return context_attention(query, key, value, plan, axis_name=AXIS, **options)

        def pull_back(pull: Any, dout: jax.Array) -> Any:
            return pull(dout)

        def both(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
            out, pull = jax.vjp(attend, query, key, value)
            return out, pull(dout)

        self._attend, self._pull_back, self._both = jax.jit(attend), jax.jit(pull_back), jax.jit(both)
        with jax.set_mesh(self._mesh):
            _, self._pull = jax.jit(functools.partial(jax.vjp, attend))(*self._operands)
        jax.block_until_ready([self.forward(), self.backward(), self.both()])

    def forward(self) -> Any:
        """Returns the output."""
        with jax.set_mesh(self._mesh):
            return self._attend(*self._operands)

    def backward(self) -> Any:
        """Returns the gradients of query, key and value."""
        with jax.set_mesh(self._mesh):
            return self._pull_back(self._pull, self._dout)

    def both(self) -> Any:
        """Returns the output and the gradients, of one program."""
        with jax.set_mesh(self._mesh):
            return self._both(*self._operands, self._dout)
