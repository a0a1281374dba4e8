"""Chains calls on all devices of a mesh one after another in one program, as work to be timed.

A loop carries one number, the token, to which the first element of each result of each call is added. The
operands of a call pass through an optimization barrier together with the token, and its results pass through
another barrier. XLA keeps these barriers until it has scheduled a program for GPUs. Therefore it can neither
drop a call or part of its results, nor merge two calls, nor run them in parallel, nor move one out of the
loop. Nothing writes to the operands, so they are never copied. What a call computes from its tables alone may
be computed once for all calls.

The measured time includes one short kernel per call that reads those elements, and the counter of the loop.
Where that matters, several calls make one turn of the loop. These calls share constants, such as zeros that
each of them adds to, and these are copied.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ._timing import DeviceWork

AXIS = "ranks"
COMMUNICATES = re.compile(
    r"[ \"]((?:ragged-)?all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    r"|jaxmagi_group_(?:cast|reduce)|jaxmagi_context_(?:forward|backward)"
    r"|jaxmagi_(?:all_gather_matmul|matmul_reduce_scatter)"
    r"|(?:call|async)(?=-start))(?:-start)?[(\"]"
)
"""Finds what communicates in the text of a compiled program."""


def mesh_of(num_ranks: int) -> Mesh:
    """Returns a mesh of the first devices, one a rank, on one axis."""
    return jax.make_mesh((num_ranks,), (AXIS,), devices=jax.devices()[:num_ranks])


@functools.lru_cache
def _drawing(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    draw = functools.partial(jax.random.normal, shape=shape, dtype=dtype)
    return jax.jit(draw, out_shardings=NamedSharding(mesh, P(mesh.axis_names)))


def draw_normal(seed: int, rows: int, shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.Array:
    """Returns a new unit-normal array with ``rows`` rows of a shape on each rank."""
    return _drawing((mesh.size * rows, *shape), dtype, mesh)(jax.random.key(seed))


def on_ranks(function: Callable[..., Any], mesh: Mesh) -> jax.stages.Wrapped:
    """Maps ``function`` over ranks under jit; all operands and results lead with the ranks' rows."""
    layout = P(mesh.axis_names)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=layout, out_specs=layout, check_vma=False))


def chain(
    function: Callable[[Any, Any], Any], operands: Any, tables: Any, mesh: Mesh, turns: int, calls: int = 1
) -> DeviceWork:
    """Calls ``function(operands, tables)`` of each rank's parts many times.

    Args:
        function: returns a pytree of floating-point arrays.
        operands: pytree of arrays that lead with the ranks' rows. The floating-point ones link the calls.
        tables: pytree of arrays that lead with the ranks' rows and that all calls share.
        mesh: each of its devices is a rank.
        turns: number of turns of the loop, at least two, as one turn makes no loop.
        calls: number of calls in each turn.

    Raises:
        RuntimeError: the compiler has moved a collective out of the loop.
    """
    run = compile_chain(function, operands, tables, mesh, turns, calls)
    return DeviceWork(lambda: run(operands, tables), jax.block_until_ready, turns * calls)


def chain_backward(
    function: Callable[[Any, Any], jax.Array],
    operands: Any,
    cotangent: jax.Array,
    tables: Any,
    mesh: Mesh,
    turns: int,
) -> DeviceWork:
    """Calls the backward pass of ``function(operands, tables)`` many times.

    The residuals of the forward pass are computed once, beforehand.

    Args:
        function: returns a floating-point array.
        operands: as in `chain`.
        cotangent: cotangent of the result, leading with the ranks' rows.
        tables: as in `chain`.
        mesh: as in `chain`.
        turns: as in `chain`.

    Raises:
        RuntimeError: as in `chain`.
    """
    structure = None

    def save(operands: Any, tables: Any) -> list[jax.Array]:
        nonlocal structure
        _, pullback = jax.vjp(lambda operands: function(operands, tables), operands)
        leaves, structure = jax.tree.flatten(pullback)
        return leaves

    def gradients(linked: tuple[list[jax.Array], jax.Array], _: Any) -> Any:
        leaves, cotangent = linked
        return jax.tree.unflatten(structure, leaves)(cotangent)

    saved = on_ranks(save, mesh)(operands, tables)
    return chain(gradients, (saved, cotangent), (), mesh, turns)


def compile_chain(
    function: Callable[[Any, Any], Any], operands: Any, tables: Any, mesh: Mesh, turns: int, calls: int
) -> jax.stages.Compiled:
    """Compiles the program of `chain`, which returns the last token of each rank."""

    def run(operands: Any, tables: Any) -> jax.Array:
        def turn(token: jax.Array, _: Any) -> tuple[jax.Array, None]:
            for _ in range(calls):
                linked, token = _wait_for(token, operands)
                token = _add_firsts(token, function(linked, tables))
            return token, None

        return jax.lax.scan(turn, jnp.zeros((), jnp.float32), None, length=turns)[0][None]

    compiled = on_ranks(run, mesh).lower(operands, tables).compile()
    _check_loop(compiled.as_text() or "")
    return compiled


def _wait_for(token: jax.Array, operands: Any) -> tuple[Any, jax.Array]:
    """Makes the floating-point operands depend on the token; returns the operands and the token."""
    leaves, structure = jax.tree.flatten(operands)
    linked = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    *held, token = jax.lax.optimization_barrier((*(leaves[i] for i in linked), token))
    for i, x in zip(linked, held, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves), token


def _add_firsts(token: jax.Array, results: Any) -> jax.Array:
    """Adds the first element of each result to the token, behind a barrier that keeps whole results."""
    made = jax.tree.leaves(jax.lax.optimization_barrier(results))
    return token + sum(x[(0,) * x.ndim].astype(token.dtype) for x in made)


def _check_loop(program: str) -> None:
    """Raises RuntimeError if a compiled program communicates outside of its loop, in the entry."""
    entry = program[program.find("\nENTRY ") :]
    if found := COMMUNICATES.search(entry):
        raise RuntimeError(
            f"the compiler has taken {found.group(1)} out of the loop that is measured, whose time would be "
            "wrong: this is a fault of jaxmagi with this version of JAX"
        )
