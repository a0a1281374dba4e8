"""A gigabyte on each GPU, and offsets past 2**31, checked on the devices by what each number has to be."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec

from .groups import Group, assert_equal, on_groups
from .harness import AXIS
from .routes import Transfer, make_transfer

WIDTH = (64, 128)
SPLITS = 64


def number(source: jax.Array) -> jax.Array:
    """uint16 [rows, *WIDTH]: some number for each element of the rows with these numbers, 0 for row -1."""
    row = source.astype(jnp.uint32)[:, None, None]
    head, place = (jax.lax.broadcasted_iota(jnp.uint32, (1, *WIDTH), i) for i in (1, 2))
    mixed = (row * 8192 + head * 128 + place) * jnp.uint32(2654435761)
    return jnp.where(source[:, None, None] < 0, 0, mixed >> 16).astype(jnp.uint16)


def small(x: jax.Array) -> jax.Array:
    """Numbers whose sums are exact in 16 bits."""
    return (x & 7).astype(jnp.bfloat16)


def check_exchange(group: Group, transfer: Transfer) -> None:
    """Makes the rows, casts them, and sends them back to be added up."""
    rows = transfer.spec.input_rows

    def local(sources: jax.Array, counts: jax.Array, spec: GroupCastSpec) -> jax.Array:
        own = jax.lax.axis_index(AXIS) * rows + jnp.arange(rows, dtype=jnp.int32)
        cast = group.cast(number(own), spec)
        arrived = jnp.all(cast == number(sources[0]))
        sums = group.reduce(small(cast), spec)
        added_up = jnp.all(sums == counts[0][:, None, None] * small(number(own)))
        return jnp.stack([arrived, added_up])[None]

    run = group.program(local, (P(AXIS), P(AXIS), P()))
    counts = transfer.counts().astype(jnp.bfloat16)
    results = run(*group.shard((transfer.source_numbers(), counts)), group.replicate(transfer.spec))
    assert_equal(results, np.ones((group.size, 2), np.bool_))


def splits(rng: np.random.Generator, rows: int, size: int) -> list[list[int]]:
    """Splits of each rank, of random lengths that sum to ``rows``."""
    cuts = [np.sort(rng.integers(0, rows + 1, SPLITS - 1)) for _ in range(size)]
    return [[int(n) for n in np.diff(cut, prepend=0, append=rows)] for cut in cuts]


@on_groups(*[Group(kind, size) for kind in ("native", "nccl") for size in (2, 4)])
def test_a_gigabyte_each(group: Group, rng: np.random.Generator) -> None:
    """Every split to the next rank, every fourth also to the one after that."""
    rows = 100 if group.implementation == "xla" else 2**16
    n = group.size
    targets = [[[(r + 1) % n, (r + 2) % n][: 1 + (i % 4 == 0)] for i in range(SPLITS)] for r in range(n)]
    check_exchange(group, make_transfer(rng, splits(rng, rows, n), targets))


@on_groups(Group("native", 2), Group("nccl", 2))
def test_offsets_past_two_to_the_31(group: Group, rng: np.random.Generator) -> None:
    """Offsets in elements leave 31 bits, too. Half of the rows stay, which halves what travels."""
    rows = 100 if group.implementation == "xla" else 2**18 + 100
    assert group.implementation == "xla" or rows * np.prod(WIDTH) > 2**31
    targets = [[[(r + i % 2) % group.size] for i in range(SPLITS)] for r in range(group.size)]
    check_exchange(group, make_transfer(rng, splits(rng, rows, group.size), targets))
