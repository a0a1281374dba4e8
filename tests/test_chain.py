"""Calls that are timed as a chain: all are made, on every rank, each after the last."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks import _chain

RANKS, PASSES = 4, 5


def on_mesh(x: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(_chain.AXIS)))


def test_every_call_is_made(rng: np.random.Generator) -> None:
    """On all ranks and in all programs, with the same results, though they are wanted once only."""
    mesh = _chain.mesh_of(RANKS)
    calls = []

    def function(xs: list[jax.Array], by: jax.Array) -> dict[str, jax.Array]:
        jax.debug.callback(lambda rank: calls.append(int(rank)), jax.lax.axis_index(_chain.AXIS))
        return {"sum": jax.lax.all_to_all(xs[0], _chain.AXIS, 0, 0, tiled=True) + xs[1] * by}

    x, y = rng.normal(size=(2, RANKS * RANKS, 3)).astype(np.float32)
    factor = np.full((RANKS, 1), 2, np.float32)
    operands = [on_mesh(x, mesh), on_mesh(y, mesh)]
    work = _chain.chain(function, operands, on_mesh(factor, mesh), mesh, PASSES)
    jax.effects_barrier()
    calls.clear()
    operands, result = work.enqueue()
    work.wait(result)
    operands, result = work.enqueue()
    work.wait(result)
    jax.effects_barrier()
    assert sorted(calls) == sorted(2 * PASSES * list(range(RANKS)))
    np.testing.assert_array_equal(operands[0], x)
    moved = x.reshape(RANKS, RANKS, 3).swapaxes(0, 1).reshape(x.shape)
    np.testing.assert_allclose(result["sum"], moved + 2 * y, rtol=1e-6)
    assert work.passes == PASSES


def test_calls_are_not_taken_out_of_the_loop() -> None:
    """What each call does is in the loop, though calls differ in nothing that matters."""
    mesh = _chain.mesh_of(RANKS)
    x = on_mesh(np.ones((RANKS, 3), np.float32), mesh)
    _chain.chain(lambda x, _: jax.lax.psum(x, _chain.AXIS), x, (), mesh, PASSES)  # checks by itself


def test_what_is_taken_out_of_the_loop_is_noticed() -> None:
    mesh = _chain.mesh_of(RANKS)
    x, table = (on_mesh(np.ones((RANKS, 3), np.float32), mesh) for _ in range(2))

    def function(x: jax.Array, table: jax.Array) -> jax.Array:
        return x + jax.lax.psum(table, _chain.AXIS)

    with pytest.raises(RuntimeError, match="all-reduce"):
        _chain.chain(function, x, table, mesh, PASSES)


def test_operands_wait_for_results() -> None:
    """The first element of each floating-point operand depends on each result, and nothing else changes."""
    operands = {"x": jnp.ones((2, 3), jnp.bfloat16), "i": jnp.arange(3)}
    results = (jnp.full((2,), 3.0), jnp.full((1, 2), 5, jnp.bfloat16))
    linked = _chain._link(operands, results, jnp.float32(1))
    np.testing.assert_array_equal(linked["i"], operands["i"])
    np.testing.assert_array_equal(linked["x"].astype(np.float32), [[9, 1, 1], [1, 1, 1]])
