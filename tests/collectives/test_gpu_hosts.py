"""Casts and sums of random transfers to the bit: over NCCL as by native kernels, and between hosts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec

from .. import hosts
from .groups import Group, assert_equal, assert_same_bits, on_groups
from .harness import AXIS
from .routes import INPUT_ROWS, Transfer, random_transfer
from .test_gpu_patterns import FLOATS
from .test_gpu_programs import poison
from .test_gpu_soak import CALLS, check_soak
from .traffic import rows_sent

ROUNDS = 300
ARRAYS = {name: FLOATS[name] for name in ("key", "value", "three", "one")}
"""In bfloat16 and float32; rows of all but the first are padded."""
ALONE, ACCUMULATED = "key", "three"
BATCH = 2
BETWEEN_HOSTS = [Group(kind, size) for kind in ("nccl", None) for size in (2, 4)]


def numbers(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...], exact: bool) -> np.ndarray:
    """Normal numbers; small integers, whose sums are exact in any order, where ``exact``."""
    return (rng.integers(-8, 9, shape) if exact else rng.normal(size=shape)).astype(dtype)


def payload(rng: np.random.Generator, transfer: Transfer, exact: bool) -> dict[str, Any]:
    """The operands of `program` other than the specs, on the host."""
    size, output_rows = transfer.cp_size, transfer.spec.output_rows
    x, y = (
        {name: numbers(rng, d, (size, rows, *shape), exact) for name, (d, shape) in ARRAYS.items()}
        for rows in (INPUT_ROWS, output_rows)
    )
    start = numbers(rng, np.float32, x[ACCUMULATED].shape, exact)
    batch = numbers(rng, jnp.bfloat16, (size, BATCH, INPUT_ROWS, 8), exact)
    return {"x": x, "y": y, "start": start, "batch": batch}


def program(group: Group) -> Any:
    """Compiled: payload, spec, stack of specs → casts and sums of one array, of several and of batches."""

    def local(payload: dict[str, Any], spec: GroupCastSpec, specs: GroupCastSpec) -> dict[str, Any]:
        p = jax.tree.map(lambda leaf: leaf[0], payload)

        def both(x: jax.Array, spec: GroupCastSpec) -> tuple[jax.Array, jax.Array]:
            rows = group.cast(x, spec)
            return rows, group.reduce(rows, spec)

        results = {
            "cast of one": group.cast(p["x"][ALONE], spec),
            "casts": group.cast(p["x"], spec),
            "sum of one": group.reduce(p["y"][ALONE], spec),
            "sums": group.reduce(p["y"], spec),
            "sum onto": group.reduce(p["y"][ACCUMULATED], spec, accumulate=p["start"]),
            "batch": jax.vmap(both)(p["batch"], specs),
        }
        return jax.tree.map(lambda leaf: leaf[None], results)

    return group.program(local, (P(AXIS), P(), P()))


def sum_in_order(transfer: Transfer, y: np.ndarray) -> np.ndarray:
    """Sums in float32, rank after rank from the first, rounded once."""
    return transfer.reduce_sum(y.astype(np.float32)).astype(y.dtype)


def wanted(payload: dict[str, Any], transfers: list[Transfer]) -> dict[str, Any]:
    """The results of `program`, row by row; the batch has all transfers, everything else has the first."""
    first, x, y = transfers[0], payload["x"], payload["y"]
    casts = {name: first.cast(rows) for name, rows in x.items()}
    sums = {name: sum_in_order(first, rows) for name, rows in y.items()}
    batch = [t.cast(payload["batch"][:, i]) for i, t in enumerate(transfers)]
    back = [sum_in_order(t, rows) for t, rows in zip(transfers, batch, strict=True)]
    return {
        "cast of one": casts[ALONE],
        "casts": casts,
        "sum of one": sums[ALONE],
        "sums": sums,
        "sum onto": payload["start"] + sums[ACCUMULATED],
        "batch": (np.stack(batch, 1), np.stack(back, 1)),
    }


def check_bits(group: Group, rounds: int) -> None:
    """Compares with the simulation, and on one host of GPUs with native kernels, over memory full of NaN.

    Half of the rounds send rows repeatedly to a rank, whose sums have to be exact.
    """
    rng = np.random.default_rng(group.size)
    run = program(group)
    is_held_against_native = group.implementation == "nccl" and hosts.count() == 1
    run_native = program(Group("native", group.size)) if is_held_against_native else None
    empty_pairs = silent_ranks = deaf_ranks = 0
    for number in range(rounds):
        repeats = number % 2 == 0
        options = {"repeats": repeats, "room_for_repeats": True}
        transfers = [random_transfer(rng, group.size, **options) for _ in range(BATCH)]
        counts = rows_sent(transfers[0], "cast")
        empty_pairs += np.count_nonzero(counts == 0)
        silent_ranks += np.count_nonzero(counts.sum(1) == 0)
        deaf_ranks += np.count_nonzero(counts.sum(0) == 0)
        specs = jax.tree.map(lambda *tables: np.stack(tables), *(t.spec for t in transfers))
        host = payload(rng, transfers[0], exact=repeats)
        operands = group.shard(host), group.replicate(transfers[0].spec), group.replicate(specs)
        for rows in (INPUT_ROWS, transfers[0].spec.output_rows):
            poison(group, (rows, 64), 8)
        results = run(*operands)
        assert_equal(results, wanted(host, transfers))
        if run_native is not None:
            assert_same_bits(run_native(*operands), results)
    assert run._cache_size() == 1
    assert rounds < ROUNDS or min(empty_pairs, silent_ranks, deaf_ranks) > 0


@on_groups(*BETWEEN_HOSTS)
def test_same_bits(group: Group) -> None:
    check_bits(group, rounds=3 if group.implementation == "xla" else ROUNDS)


@on_groups(Group(None, 2), Group(None, 4))
def test_soak_inside_and_between_hosts(group: Group) -> None:
    """Native kernels and NCCL take turns on the same streams."""
    check_soak(group, 40 if group.implementation == "xla" else CALLS // 2)
