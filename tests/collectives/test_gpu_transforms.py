"""Derivatives, batching, scans and rematerialisation of the collectives, on groups of GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec

from .groups import SEVERAL, Group, assert_close, assert_equal, assert_same_bits, on_groups, place
from .harness import AXIS, normal
from .routes import INPUT_ROWS, random_transfer


def check_transposes(group: Group) -> None:
    """The cotangent of a cast is a reduction, to the bit, and the other way round; specs come sharded."""
    rng = np.random.default_rng(group.size)
    transfer = random_transfer(rng, group.size)
    x = normal(rng, group.size, INPUT_ROWS, 3), normal(rng, group.size, INPUT_ROWS, 8, dtype=jnp.bfloat16)
    y = tuple(normal(rng, group.size, transfer.spec.output_rows, *z.shape[2:], dtype=z.dtype) for z in x)

    def local(x: Any, y: Any, spec: GroupCastSpec) -> Any:
        x, y = jax.tree.map(lambda leaf: leaf[0], (x, y))
        cast, from_cast = jax.vjp(lambda x: group.cast(x, spec), x)
        reduced, from_reduce = jax.vjp(lambda y: group.reduce(y, spec), y)
        results = cast, from_reduce(x)[0], reduced, from_cast(y)[0]
        return jax.tree.map(lambda leaf: leaf[None], results)

    run = group.program(local, (P(AXIS), P(AXIS), P(AXIS)))
    cast, cast_again, reduced, reduced_again = run(*group.shard((x, y, transfer.spec)))
    assert_equal(cast, tuple(transfer.cast(z) for z in x))
    assert_same_bits(cast_again, cast)
    assert_close(reduced[0], transfer.reduce_sum(y[0]), 1e-6)
    assert_same_bits(reduced_again, reduced)


def check_vmap(group: Group) -> None:
    """Maps over x, over specs and over both, and back; the stack of specs is replicated, then sharded."""
    rng = np.random.default_rng(group.size)
    transfers = [random_transfer(rng, group.size) for _ in range(2)]
    first = transfers[0]
    specs = jax.tree.map(lambda *tables: np.stack(tables), *(t.spec for t in transfers))
    x = normal(rng, group.size, 2, INPUT_ROWS, 3)

    def local(x: jax.Array, specs: GroupCastSpec) -> Any:
        x = x[0]
        spec = jax.tree.map(lambda table: table[0], specs)

        def both(x: jax.Array, spec: GroupCastSpec) -> tuple[jax.Array, jax.Array]:
            y = group.cast(x, spec)
            return y, group.reduce(y, spec)

        results = [
            jax.vmap(both, axes)(*operands)
            for axes, operands in (((0, None), (x, spec)), ((None, 0), (x[0], specs)), ((0, 0), (x, specs)))
        ]
        return jax.tree.map(lambda leaf: leaf[None], results)

    batches = [
        [(first, 0), (first, 1)],
        [(t, 0) for t in transfers],
        list(zip(transfers, (0, 1), strict=True)),
    ]
    for layout in (P(), P(None, AXIS)):
        results = group.program(local, (P(AXIS), layout))(group.shard(x), place(specs, group.mesh, layout))
        for (y, z), batch in zip(results, batches, strict=True):
            casts = [transfer.cast(x[:, i]) for transfer, i in batch]
            assert_equal(y, np.stack(casts, 1))
            sums = [transfer.reduce_sum(y) for (transfer, _), y in zip(batch, casts, strict=True)]
            assert_close(z, np.stack(sums, 1), 1e-6)


LAYERS = 3


def check_scan_and_remat(group: Group) -> None:
    """Checkpointed layers x + reduce(tanh(cast(x))), each with a spec of its own, and their gradient.

    What a row gets back is as many times its tanh as there are places that it was sent to.
    """
    rng = np.random.default_rng(group.size)
    transfers = [random_transfer(rng, group.size) for _ in range(LAYERS)]
    specs = jax.tree.map(lambda *tables: np.stack(tables), *(t.spec for t in transfers))
    x, dy = normal(rng, 2, group.size, INPUT_ROWS, 3)

    def local(x: jax.Array, dy: jax.Array, specs: GroupCastSpec) -> tuple[jax.Array, jax.Array]:
        @jax.checkpoint
        def layer(x: jax.Array, spec: GroupCastSpec) -> tuple[jax.Array, None]:
            return x + group.reduce(jnp.tanh(group.cast(x, spec)), spec), None

        y, vjp = jax.vjp(lambda x: jax.lax.scan(layer, x, specs)[0], x[0])
        return y[None], vjp(dy[0])[0][None]

    run = group.program(local, (P(AXIS), P(AXIS), P()))
    y, dx = run(*group.shard((x, dy)), group.replicate(specs))
    slope = np.ones_like(x)
    for transfer in transfers:
        counts = transfer.counts()[..., None].astype(np.float32)
        slope *= 1 + counts * (1 - np.tanh(x) ** 2)
        x = x + counts * np.tanh(x)
    assert_close((y, dx), (x, slope * dy), 1e-4)


@on_groups(*SEVERAL, Group("native", 1), Group(None, 2, ranks_per_host=1))
def test_transposes(group: Group) -> None:
    check_transposes(group)


@on_groups(*SEVERAL)
def test_vmap(group: Group) -> None:
    check_vmap(group)


@on_groups(*SEVERAL)
def test_scan_and_remat(group: Group) -> None:
    check_scan_and_remat(group)
