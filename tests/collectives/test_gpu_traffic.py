"""NCCL moves no more than is needed: each row once, few bytes beside it, nothing for empty pairs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from .groups import Group
from .harness import AXIS, normal
from .routes import INPUT_ROWS, Transfer, make_transfer, random_transfer
from .traffic import Kind, counters, needed

pytestmark = pytest.mark.gpu

WIDTHS: dict[Any, tuple[int, ...]] = {jnp.bfloat16: (2, 64), np.float32: (4,)}
"""Shapes of the rows of a call by their dtype: whole units of 16 bytes, which are not padded."""
ROW_BYTES = 2 * 64 * 2 + 4 * 4
MOST_CONTROL_BYTES = 256  # of a pair

groups = pytest.mark.parametrize(
    "group",
    [
        *[Group(kind, size) for kind in ("nccl", None) for size in (2, 4)],
        Group("native", 2),
        Group(None, 2, ranks_per_host=1),
        Group(None, 4, ranks_per_host=2),
    ],
    ids=str,
    indirect=True,
)
kinds = pytest.mark.parametrize("kind", ["cast", "reduce"])


def program(group: Group, kind: Kind) -> Any:
    """Compiled: arrays, spec → what comes of them."""
    move = group.cast if kind == "cast" else group.reduce

    def local(x: Any, spec: Any) -> Any:
        moved = move(jax.tree.map(lambda leaf: leaf[0], x), spec)
        return jax.tree.map(lambda leaf: leaf[None], moved)

    return group.program(local, (P(AXIS), P()))


def one_row(size: int) -> Transfer:
    """A single row, from the first rank to the last."""
    rng = np.random.default_rng(0)
    targets = [[[size - 1]], *([[]] for _ in range(size - 1))]
    transfer = make_transfer(rng, [[1], *([0] for _ in range(size - 1))], targets)
    return Transfer(dataclasses.replace(transfer.spec, input_rows=INPUT_ROWS), transfer.sources)


def transfers(size: int) -> list[Transfer]:
    """Random ones of the same static sizes, and one of which most ranks have nothing."""
    rng = np.random.default_rng(size)
    drawn = [random_transfer(rng, size) for _ in range(10)]
    sizes = {name: getattr(drawn[0].spec.capacity, name) for name in ("copies", "output_rows", "pair_rows")}
    single = one_row(size)
    return [*drawn, Transfer(single.spec.padded(**sizes), single.sources)]


@kinds
@groups
def test_bytes_and_messages(group: Group, kind: Kind, rng: np.random.Generator) -> None:
    run = program(group, kind)
    for number, transfer in enumerate(transfers(group.size)):
        rows = INPUT_ROWS if kind == "cast" else transfer.spec.output_rows
        x = [normal(rng, group.size, rows, *shape, dtype=dtype) for dtype, shape in WIDTHS.items()]
        operands = group.shard(x), group.replicate(transfer.spec)
        if number == 0:
            jax.block_until_ready(run(*operands))  # the first call also brings the ranks together
        before = counters()
        jax.block_until_ready(run(*operands))
        after = counters()
        moved = {name: after[name] - before[name] for name in before}
        need = needed(group, transfer, kind)
        assert min(moved.values()) >= 0
        assert moved["transfers"] > 0
        assert moved["nccl_bytes"] == need.rows * ROW_BYTES
        assert moved["control_bytes"] <= MOST_CONTROL_BYTES * need.pairs
        assert need.pairs_in_use <= moved["nccl_messages"] <= need.ranges * len(WIDTHS)


@groups
def test_batches(group: Group, rng: np.random.Generator) -> None:
    """Each example of a batch takes its rows, and all together what a pair may have beside them."""
    batch, transfer = 3, random_transfer(rng, group.size)
    x = normal(rng, group.size, batch, INPUT_ROWS, 8)

    def local(x: jax.Array, spec: Any) -> jax.Array:
        return jax.vmap(lambda one: group.cast(one, spec))(x[0])[None]

    run = group.program(local, (P(AXIS), P()))
    operands = group.shard(x), group.replicate(transfer.spec)
    jax.block_until_ready(run(*operands))
    before = counters()
    jax.block_until_ready(run(*operands))
    after = counters()
    need = needed(group, transfer, "cast")
    assert after["nccl_bytes"] - before["nccl_bytes"] == batch * need.rows * 8 * 4
    assert after["control_bytes"] - before["control_bytes"] <= MOST_CONTROL_BYTES * need.pairs
