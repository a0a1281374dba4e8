"""Calls on all devices of a mesh, one after another in one program, as work to be timed.

Each call is made to wait for the one before: the first element of each of its operands is itself plus
something of the last results that is zero, which the compiler does not know. So it can neither leave out a
call, nor make two of them one, nor run them side by side; and all results are written in full, for they are
carried from call to call. That costs one short kernel for each operand and call, which is part of what is
measured.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks._measure import DeviceWork

AXIS = "ranks"
_COLLECTIVE = re.compile(r"\b(all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(-start)?\(")


def mesh_of(num_ranks: int) -> Mesh:
    """The first devices, one a rank."""
    return jax.make_mesh((num_ranks,), (AXIS,), devices=jax.devices()[:num_ranks])


@functools.lru_cache
def _drawing(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    draw = functools.partial(jax.random.normal, shape=shape, dtype=dtype)
    return jax.jit(draw, out_shardings=NamedSharding(mesh, P(AXIS)))


def draw_normal(seed: int, rows: int, shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.Array:
    """A new unit-normal array with so many rows of a shape on each rank."""
    return _drawing((mesh.size * rows, *shape), dtype, mesh)(jax.random.key(seed))


def on_ranks(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """``function`` of ranks' parts, compiled; all operands and results lead with the ranks' rows."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))


def chain(
    function: Callable[[Any, Any], Any], operands: Any, tables: Any, mesh: Mesh, passes: int
) -> DeviceWork:
    """``function(operands, tables)`` of each rank's parts, as many times as ``passes`` says.

    Args:
        function: returns a pytree of floating-point arrays, and something of each in every result.
        operands: pytree of arrays that lead with the ranks' rows; they are used up. Calls are linked by the
            floating-point ones.
        tables: likewise, of what all calls share.
        mesh: of `mesh_of`.
        passes: see above.

    Raises:
        RuntimeError: the compiler has taken a collective out of the loop.
    """
    zero = jnp.zeros((), jnp.float32)
    result = on_ranks(function, mesh)(operands, tables)

    def calls(operands: Any, result: Any, tables: Any, zero: jax.Array) -> tuple[Any, Any]:
        def call(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
            operands, result = carry
            operands = _link(operands, result, zero)
            return (operands, function(operands, tables)), None

        return jax.lax.scan(call, (operands, result), None, length=passes)[0]

    specs = (P(AXIS), P(AXIS), P(AXIS), P())
    mapped = jax.shard_map(calls, mesh=mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)
    run = jax.jit(mapped, donate_argnums=(0, 1)).lower(operands, result, tables, zero).compile()
    _check_loop(run.as_text() or "")
    state = (operands, result)

    def enqueue() -> Any:
        nonlocal state
        state = run(*state, tables, zero)
        return state

    return DeviceWork(enqueue, jax.block_until_ready, passes)


def _link(operands: Any, result: Any, zero: jax.Array) -> Any:
    """The operands, to be had only after the result."""
    firsts = [_first(x).reshape(()).astype(zero.dtype) for x in jax.tree.leaves(result)]
    nothing = sum(firsts) * zero

    def link(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jax.lax.dynamic_update_slice(x, _first(x) + nothing.astype(x.dtype), (0,) * x.ndim)

    # The barrier, so that it is not made once more within what reads an operand, which would then be copied.
    return jax.lax.optimization_barrier(jax.tree.map(link, operands))


def _first(x: jax.Array) -> jax.Array:
    """The first element, with all axes."""
    return x[(slice(1),) * x.ndim]


def _check_loop(program: str) -> None:
    """RuntimeError if the entry of a compiled program communicates, for all that is measured is in a loop."""
    entry = program[program.find("\nENTRY ") :]
    if found := _COLLECTIVE.search(entry):
        raise RuntimeError(f"the compiler has taken {found.group(1)} out of the loop that is measured")
