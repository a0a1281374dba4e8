"""Chains of timed calls make all calls, on every rank, one after another, and nothing else."""

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks import _jax_collectives, _transfers
from jaxmagi.calibration import _chain

RANKS, TURNS, CALLS = 4, 5, 3
COPY = re.compile(r"= \w+\[([\d,]+)\]\S* copy\(")
IN_LAX = re.compile(r"plain|padded|lax\.(?!ragged)|ring")
DIRECTIONS: tuple[_jax_collectives.Direction, ...] = ("cast", "reduce f32")


def on_mesh(x: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(_chain.AXIS)))


def num_copies(program: str, size: int) -> int:
    """Counts the copies of arrays with at least ``size`` elements."""
    return sum(math.prod(map(int, dims.split(","))) >= size for dims in COPY.findall(program))


def test_every_call_is_made(rng: np.random.Generator) -> None:
    """All ranks call the function with the same operands in all programs, though all results are equal."""
    mesh = _chain.mesh_of(RANKS)
    seen = []

    def function(xs: list[jax.Array], by: jax.Array) -> dict[str, jax.Array]:
        moved = jax.lax.all_to_all(xs[0], _chain.AXIS, 0, 0, tiled=True)
        jax.debug.callback(
            lambda rank, x: seen.append((int(rank), x)), jax.lax.axis_index(_chain.AXIS), moved
        )
        return {"sum": moved + xs[1] * by.astype(moved.dtype), "half": moved.astype(jnp.bfloat16)}

    x, y = rng.integers(9, size=(2, RANKS * RANKS, 3)).astype(np.float32)
    operands, tables = [on_mesh(x, mesh), on_mesh(y, mesh)], on_mesh(np.full((RANKS, 1), 2), mesh)
    work = _chain.chain(function, operands, tables, mesh, TURNS, CALLS)
    work.wait(work.enqueue())
    token = work.enqueue()
    work.wait(token)
    jax.effects_barrier()
    assert sorted(rank for rank, _ in seen) == sorted(2 * TURNS * CALLS * list(range(RANKS)))
    moved = x.reshape(RANKS, RANKS, 3).swapaxes(0, 1)
    for rank, found in seen:
        np.testing.assert_array_equal(found, moved[rank])
    firsts = 2 * moved[:, 0, 0] + 2 * y[::RANKS, 0]
    np.testing.assert_array_equal(token, TURNS * CALLS * firsts)
    assert work.passes == TURNS * CALLS


def test_collectives_out_of_the_loop_are_found() -> None:
    mesh = _chain.mesh_of(RANKS)
    x, table = (on_mesh(np.ones((RANKS, 3), np.float32), mesh) for _ in range(2))

    def function(x: jax.Array, table: jax.Array) -> jax.Array:
        return x + jax.lax.psum(table, _chain.AXIS)

    with pytest.raises(RuntimeError, match="all-reduce"):
        _chain.chain(function, x, table, mesh, TURNS)


@pytest.mark.parametrize(
    "call, found",
    [
        ("%y = f32[2] all-gather(%x), dimensions={0}", True),
        ("%y = (f32[2], f32[4]) all-gather-start(%x), dimensions={0}", True),
        ("%y = f32[4] all-gather-done(%all-gather-start)", False),
        ("%y = f32[4] ragged-all-to-all(%x, %z)", True),
        ('%y = f32[4] custom-call(%x), custom_call_target="jaxmagi_group_cast"', True),
        ('%y = f32[4] custom-call(%x), custom_call_target="jaxmagi_context_backward"', True),
        ('%y = f32[4] custom-call(%x), custom_call_target="jaxmagi_attention_tile_schedule"', False),
        ('%y = f32[4] add(%x, %x), metadata={op_name="jit(f)/jaxmagi_group_cast"}', False),
        ("%y = ((f32[2]), f32[2]) call-start(%x), to_apply=%f", True),
        ("%y = f32[4] call(%x), to_apply=%f", False),
    ],
)
def test_communication_is_found(call: str, found: bool) -> None:
    assert bool(_chain.COMMUNICATES.search(call)) == found


@pytest.mark.parametrize(
    ("transfer", "direction"),
    list(zip(_transfers.transfers(RANKS, 1024), itertools.cycle(DIRECTIONS), strict=False)),
    ids=lambda value: getattr(value, "name", value),
)
def test_programs_make_calls_and_nothing_else(
    transfer: _transfers.Transfer, direction: _jax_collectives.Direction
) -> None:
    """A turn has the collectives of all its calls, and no more copies of operands than a call has."""
    mesh = _chain.mesh_of(RANKS)
    for name, implementation in _jax_collectives.implementations(transfer, direction).items():
        if not IN_LAX.search(name):
            continue
        tables = jax.device_put(implementation.tables, NamedSharding(mesh, P(_chain.AXIS)))
        operands = implementation.operands(direction, mesh)
        call = _chain.on_ranks(implementation.run, mesh).lower(operands, tables).compile().as_text() or ""
        one, several = (
            _chain.compile_chain(implementation.run, operands, tables, mesh, TURNS, calls).as_text() or ""
            for calls in (1, CALLS)
        )
        count, size = len(_chain.COMMUNICATES.findall(call)), operands[0].size // RANKS
        assert len(_chain.COMMUNICATES.findall(one)) == count > 0, name
        assert len(_chain.COMMUNICATES.findall(several)) == CALLS * count, name
        assert num_copies(one, size) <= num_copies(call, size), name


def test_copies_are_found() -> None:
    """A call that writes to an operand copies it, as all calls share it."""
    mesh = _chain.mesh_of(RANKS)
    x = on_mesh(np.ones((RANKS * 8, 3), np.float32), mesh)

    def function(x: jax.Array, _: Any) -> jax.Array:
        written = jax.lax.dynamic_update_slice(x, jnp.zeros((1, 3)), (jax.lax.axis_index(_chain.AXIS), 0))
        return jax.lax.ppermute(written, _chain.AXIS, [(i, i) for i in range(RANKS)])

    program = _chain.compile_chain(function, x, (), mesh, TURNS, CALLS).as_text()
    assert program and num_copies(program, 24) >= CALLS
