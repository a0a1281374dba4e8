"""Asynchronous transfers, with computations between start and wait, on groups of GPUs."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import CollectiveOptions, GroupCastSpec
from jaxmagi.collectives import AsyncTransfer, in_order, make_transfer

from .groups import SEVERAL, Group, assert_close, assert_equal, on_groups, require_devices, require_one_host
from .harness import AXIS, normal
from .routes import INPUT_ROWS, make_transfer as transfer_by_splits, random_transfer

WIDTH = 64
ROTATION, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
GROUPS = [*SEVERAL, Group("native", 1), Group(None, 2, ranks_per_host=1), Group("native", 4, num_sms=132)]


def transfer_of(group: Group, spec: Any) -> Any:
    """A rank's view of a spec, to be made as the group does."""
    return make_transfer(spec, AXIS, group.options)


def overlap(work: jax.Array, transfers: list[AsyncTransfer]) -> tuple[jax.Array, list[AsyncTransfer]]:
    """Rotates rows several times, which keeps errors small, during transfers."""
    work, transfers = in_order(work, transfers)
    for _ in range(4):
        work = jnp.matmul(work, ROTATION.astype(work.dtype), precision="highest")
    return in_order(work, transfers)


def rotated(work: np.ndarray, times: int) -> np.ndarray:
    """The result of so many calls of `overlap`, in float64."""
    return (work @ np.linalg.matrix_power(ROTATION, 4 * times)).astype(work.dtype)


@on_groups(*GROUPS)
def test_cast_and_reduction_at_once(group: Group, rng: np.random.Generator) -> None:
    """Two arrays, one with rows that are no whole units, are transferred repeatedly in the same buffers."""
    turns = 20
    transfer = random_transfer(rng, group.size)
    rows = transfer.spec.output_rows
    x = [normal(rng, turns, group.size, INPUT_ROWS, *shape) for shape in ((3,), (2, 8))]
    y = [normal(rng, turns, group.size, rows, *shape) for shape in ((5,), (4, 4))]
    work = normal(rng, group.size, WIDTH, WIDTH)

    def local(x: Any, y: Any, work: jax.Array, spec: GroupCastSpec) -> Any:
        rank = transfer_of(group, spec)

        def turn(work: jax.Array, operands: Any) -> Any:
            x, y = operands
            cast = rank.start_cast(x, transfer_id=0, goes_first=True)
            reduction = rank.start_reduce(y, [z.dtype for z in y], transfer_id=1, goes_first=False)
            work, started = overlap(work, [cast, reduction])
            return work, [pending.wait() for pending in started]

        x, y = jax.tree.map(lambda leaf: leaf[:, 0], (x, y))
        work, results = jax.lax.scan(turn, work[0], (x, y))
        return work[None], jax.tree.map(lambda leaf: leaf[None], results)

    run = group.program(local, (P(None, AXIS), P(None, AXIS), P(AXIS), P()))
    along_ranks = jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), (x, y))
    placed = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), group.shard(along_ranks))
    computed, (cast, sums) = run(*placed, group.shard(work), group.replicate(transfer.spec))
    assert_equal(cast, [np.stack([transfer.cast(one) for one in z], 1) for z in x])
    assert_close(sums, [np.stack([transfer.reduce_sum(one) for one in z], 1) for z in y], 1e-6)
    assert_close(computed, rotated(work, turns), 1e-4)


@on_groups(*SEVERAL)
def test_synchronous_during_asynchronous(group: Group, rng: np.random.Generator) -> None:
    """One group makes another transfer during an asynchronous one, and one after it."""
    transfer = random_transfer(rng, group.size)
    x, z = normal(rng, group.size, INPUT_ROWS, 4), normal(rng, group.size, INPUT_ROWS, 8)

    def local(x: jax.Array, z: jax.Array, spec: GroupCastSpec) -> Any:
        rank = transfer_of(group, spec)
        z, started = in_order(z[0], [rank.start_cast([x[0]], transfer_id=0, goes_first=True)])
        (at_once,) = rank.cast([z])
        at_once, (pending,) = in_order(at_once, started)
        (asynchronous,) = pending.wait()
        (behind,) = rank.reduce([asynchronous], [asynchronous.dtype])
        return [y[None] for y in (at_once, asynchronous, behind)]

    run = group.program(local, (P(AXIS), P(AXIS), P()))
    for _ in range(3):
        at_once, asynchronous, behind = run(*group.shard((x, z)), group.replicate(transfer.spec))
        assert_equal(at_once, transfer.cast(z))
        assert_equal(asynchronous, transfer.cast(x))
        assert_close(behind, transfer.reduce_sum(transfer.cast(x)), 1e-6)


@on_groups(*SEVERAL)
def test_vmap(group: Group, rng: np.random.Generator) -> None:
    """Over x and over both x and specs."""
    transfers = [random_transfer(rng, group.size) for _ in range(2)]
    specs = jax.tree.map(lambda *tables: np.stack(tables), *(t.spec for t in transfers))
    x, work = normal(rng, group.size, 2, INPUT_ROWS, 3), normal(rng, group.size, 2, 16, WIDTH)

    def local(x: jax.Array, work: jax.Array, specs: GroupCastSpec) -> Any:
        def one(x: jax.Array, work: jax.Array, spec: GroupCastSpec) -> tuple[jax.Array, jax.Array]:
            rank = transfer_of(group, spec)
            _, (pending,) = overlap(work, [rank.start_cast([x], transfer_id=0, goes_first=True)])
            (y,) = pending.wait()
            _, (pending,) = overlap(work, [rank.start_reduce([y], [y.dtype], transfer_id=0, goes_first=True)])
            return y, pending.wait()[0]

        first = jax.tree.map(lambda table: table[0], specs)
        shared = jax.vmap(one, (0, 0, None))(x[0], work[0], first)
        return jax.tree.map(lambda leaf: leaf[None], (shared, jax.vmap(one)(x[0], work[0], specs)))

    results = group.program(local, (P(AXIS), P(AXIS), P()))(*group.shard((x, work)), group.replicate(specs))
    for (y, z), batch in zip(results, ([transfers[0]] * 2, transfers), strict=True):
        casts = [transfer.cast(x[:, i]) for i, transfer in enumerate(batch)]
        assert_equal(y, np.stack(casts, 1))
        sums = [transfer.reduce_sum(y) for transfer, y in zip(batch, casts, strict=True)]
        assert_close(z, np.stack(sums, 1), 1e-6)


@on_groups(Group(None, 4))
def test_between_hosts(group: Group, rng: np.random.Generator) -> None:
    """The spec has two steps, with hosts of one rank on the CPU and of two on GPUs."""
    transfer = random_transfer(rng, group.size)
    relayed = transfer.spec.by_host(1 if group.size % 2 else 2)
    x = normal(rng, group.size, INPUT_ROWS, 4)
    y = normal(rng, group.size, transfer.spec.output_rows, 4)

    def local(x: jax.Array, y: jax.Array, spec: Any) -> Any:
        rank = make_transfer(spec, AXIS, CollectiveOptions())
        cast = rank.start_cast([x[0]], transfer_id=0, goes_first=True)
        reduction = rank.start_reduce([y[0]], [y.dtype], transfer_id=1, goes_first=False)
        return [pending.wait()[0][None] for pending in (cast, reduction)]

    run = group.program(local, (P(AXIS), P(AXIS), P()))
    cast, sums = run(*group.shard((x, y)), group.replicate(relayed))
    assert_equal(cast, transfer.cast(x))
    assert_close(sums, transfer.reduce_sum(y), 1e-6)


@on_groups(*SEVERAL)
def test_nothing_to_move(group: Group) -> None:
    """Empty arrays are there at once."""
    transfer = random_transfer(np.random.default_rng(0), group.size)
    x = np.zeros((group.size, INPUT_ROWS, 0), np.float32)

    def local(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        pending = transfer_of(group, spec).start_cast([x[0]], transfer_id=0, goes_first=True)
        assert not pending.arrays
        _, (pending,) = in_order(x, [pending])
        return pending.wait()[0][None]

    run = group.program(local, (P(AXIS), P()))
    assert_equal(run(group.shard(x), group.replicate(transfer.spec)), transfer.cast(x))


@pytest.mark.gpu
def test_start_and_wait_in_two_programs(rng: np.random.Generator) -> None:
    """Without jit start and wait are two programs, between which others may run."""
    require_devices(2)
    group = Group("native", 2)
    require_one_host(group)
    transfer = random_transfer(rng, 2, repeats=True)
    x = normal(rng, 2, INPUT_ROWS, 4)

    def local(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        return transfer_of(group, spec).start_cast([x[0]], transfer_id=0, goes_first=False).wait()[0][None]

    mapped = jax.shard_map(local, mesh=group.mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="both calls must be in one program"):
        jax.block_until_ready(mapped(group.shard(x), group.replicate(transfer.spec)))


@pytest.mark.gpu
def test_start_alone_in_a_program(rng: np.random.Generator) -> None:
    """Waiting in another program is an error, even with the results in their places."""
    require_devices(2)
    group = Group("native", 2)
    require_one_host(group)
    transfer = random_transfer(rng, 2, repeats=True)
    x = normal(rng, 2, INPUT_ROWS, 4)
    started = []

    def start(x: jax.Array, spec: GroupCastSpec) -> list[jax.Array]:
        started.append(transfer_of(group, spec).start_cast([x[0]], transfer_id=0, goes_first=False))
        return [array[None] for array in started[-1].arrays]

    def wait(arrays: list[jax.Array]) -> jax.Array:
        return started[-1].finish(tuple(array[0] for array in arrays))[0][None]

    arrays = group.program(start, (P(AXIS), P()))(group.shard(x), group.replicate(transfer.spec))
    waiting = jax.jit(
        jax.shard_map(wait, mesh=group.mesh, in_specs=P(AXIS), out_specs=P(AXIS)),
        donate_argnums=0,  # or XLA would copy the results
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="both calls must be in one program"):
        jax.block_until_ready(waiting(arrays))


@pytest.mark.gpu
def test_program_that_fails_before_it_waits(rng: np.random.Generator) -> None:
    """Others get the memory that its transfer writes, and come after that, also if they have no transfers."""
    require_devices(2)
    if jax.process_count() > 1:
        pytest.skip("after a callback that fails, JAX aborts a process at its end")
    group = Group("native", 2, num_sms=1)  # so that a gigabyte takes 25 ms
    shape = (2**18, 1024)
    spec = transfer_by_splits(rng, [[shape[0]], [shape[0]]], [[[1]], [[0]]]).spec

    def fail(_: Any) -> np.ndarray:
        raise RuntimeError("something before the wait")

    def local(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        pending = transfer_of(group, spec).start_cast([x[0]], transfer_id=0, goes_first=True)
        between = jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), pending.arrays[0])
        between, (pending,) = in_order(between, [pending])
        return pending.wait()[0][None] + between

    run = group.program(local, (P(AXIS), P()))
    fill = group.program(lambda value: jnp.full((1, *shape), value[0]), P(AXIS))
    ones, sevens = group.shard([np.full(2, value, np.float32) for value in (1, 7)])
    x = fill(ones)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something before the wait"):
        jax.block_until_ready(run(x, group.replicate(spec)))
    filled = jax.block_until_ready([fill(sevens) for _ in range(4)])
    time.sleep(0.5)  # until the transfer has ended in any case
    assert all(jnp.all(array == 7) for array in filled)
