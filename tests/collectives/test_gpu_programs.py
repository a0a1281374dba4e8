"""The collectives in programs with XLA's own, captured or not, and over memory that is not clean."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec

from ..attention.gpu_harness import has_command_buffers, with_command_buffers
from .groups import SEVERAL, Group, assert_close, assert_equal, on_groups
from .harness import AXIS, normal
from .routes import INPUT_ROWS, random_transfer

WIDTH = 16


def with_other_collectives(group: Group) -> Any:
    """Independent collectives, XLA's and ours, with a matmul, then some that depend on them."""
    ring = [(i, (i + 1) % group.size) for i in range(group.size)]

    def local(x: jax.Array, weights: jax.Array, spec: GroupCastSpec) -> dict[str, jax.Array]:
        x = x[0]
        cast = group.cast(x, spec)
        total = jax.lax.psum(x, AXIS)
        everyone = jax.lax.all_gather(x, AXIS, tiled=True)
        shifted = jax.lax.ppermute(x, AXIS, ring)
        hidden = group.cast(jnp.tanh(x @ weights), spec)
        back = group.reduce(cast + total[:1], spec)
        results = {
            "cast": cast,
            "gathered": everyone,
            "cast of shifted": group.cast(shifted, spec),
            "psum of cast": jax.lax.psum(hidden, AXIS),
            "reduced": back,
        }
        return jax.tree.map(lambda leaf: leaf[None], results)

    return jax.shard_map(local, mesh=group.mesh, in_specs=(P(AXIS), P(), P()), out_specs=P(AXIS))


@pytest.mark.parametrize("kinds", ["", "FUSION,CUBLAS,COLLECTIVES,CUSTOM_CALL"], ids=["launched", "captured"])
@on_groups(*SEVERAL)
def test_with_collectives_of_xla(group: Group, kinds: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Ours run outside of command buffers, whatever is in them."""
    run = with_command_buffers(with_other_collectives(group), kinds, tmp_path)
    weights = group.replicate(normal(rng, WIDTH, WIDTH))
    for _ in range(3):
        transfer = random_transfer(rng, group.size)
        x = normal(rng, group.size, INPUT_ROWS, WIDTH)
        operands = group.shard(x), weights, group.replicate(transfer.spec)
        results = [run(*operands) for _ in range(3)][-1]
        cast, total = transfer.cast(x), x.sum(0)[:1]
        assert_equal(results["cast"], cast)
        assert_equal(results["gathered"], np.stack([x.reshape(-1, WIDTH)] * group.size))
        assert_equal(results["cast of shifted"], transfer.cast(np.roll(x, 1, axis=0)))
        hidden = transfer.cast(np.tanh(x @ np.asarray(weights)))
        assert_close(results["psum of cast"], np.stack([hidden.sum(0)] * group.size), 2e-2)  # TF32
        assert_close(results["reduced"], transfer.reduce_sum(cast + total), 1e-5)
    if group.implementation != "xla":
        assert has_command_buffers(tmp_path) == bool(kinds)


@functools.cache
def nan_program(group: Group, shape: tuple[int, ...]) -> Any:
    return group.program(lambda: jnp.full((1, *shape), jnp.nan), ())


def poison(group: Group, shape: tuple[int, ...], count: int) -> set[range]:
    """Frees arrays of NaN of the shape on each rank; the addresses that they had."""
    arrays = [nan_program(group, shape)() for _ in range(count)]
    places = [shard.data for array in arrays for shard in array.addressable_shards]
    return {range(x.unsafe_buffer_pointer(), x.unsafe_buffer_pointer() + x.nbytes) for x in places}


@on_groups(*SEVERAL, Group("native", 1), Group(None, 4, ranks_per_host=2))
def test_rows_that_nobody_sends_are_zero_in_dirty_memory(group: Group, rng: np.random.Generator) -> None:
    """Each result lies where NaN was, as on GPUs what is freed last is taken first."""
    lead, widths = (group.size, INPUT_ROWS), (64, 3)

    def local(x: Any, spec: GroupCastSpec) -> Any:
        cast = group.cast(jax.tree.map(lambda leaf: leaf[0], x), spec)
        return jax.tree.map(lambda leaf: leaf[None], (cast, group.reduce(cast, spec)))

    run = group.program(local, (P(AXIS), P()))
    for _ in range(3):
        transfer = random_transfer(rng, group.size, most_rows=8)
        x = tuple(normal(rng, *lead, width) for width in widths)
        operands = group.shard(x), group.replicate(transfer.spec)
        dirty = set[range]()
        for rows in (transfer.spec.output_rows, INPUT_ROWS):
            for width in widths:
                dirty |= poison(group, (rows, width), 64)
        casts, sums = run(*operands)
        wanted = tuple(transfer.cast(leaf) for leaf in x)
        assert_equal(casts, wanted)
        assert_close(sums, tuple(transfer.reduce_sum(leaf) for leaf in wanted), 1e-6)
        if group.implementation != "xla":
            addresses = [shard.data.unsafe_buffer_pointer() for shard in casts[0].addressable_shards]
            assert any(address in place for address in addresses for place in dirty)
