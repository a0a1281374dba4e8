"""Random transfers of arrays of all kinds, by one compiled program, against the row-by-row simulation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec

from .groups import EVERY, Group, assert_close, assert_equal, assert_same_bits, on_groups
from .harness import AXIS
from .routes import INPUT_ROWS, Transfer, random_transfer

FLOATS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "key": (jnp.bfloat16, (2, 64)),
    "value": (jnp.bfloat16, (300,)),
    "half": (np.float16, (5,)),
    "three": (np.float32, (3,)),
    "one": (np.float32, ()),
    "double": (np.float64, (2,)),
}
INTEGERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "token": (np.int32, ()),
    "flags": (np.bool_, (3,)),
    "bytes": (np.uint8, (7,)),
}
"""Integers and floats together are more arrays than a call takes."""
ACCUMULATED = ("key", "three")
HEADS = (2, 16)
RELATIVE_ERROR = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-6, "float64": 1e-14}
"""Errors of sums relative to the sum of magnitudes."""


def payload(rng: np.random.Generator, transfer: Transfer) -> dict[str, Any]:
    """The operands of `program` other than the spec, on the host."""
    lead = (transfer.cp_size, transfer.spec.output_rows)

    def normal(dtype: Any, *shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    x = {name: normal(d, *lead[:1], INPUT_ROWS, *shape) for name, (d, shape) in FLOATS.items()}
    x |= {
        name: rng.integers(0, 2, (*lead[:1], INPUT_ROWS, *shape)).astype(d)
        for name, (d, shape) in INTEGERS.items()
    }
    part, part_lse = normal(np.float32, *lead, *HEADS), 5 * normal(np.float32, *lead, HEADS[0])
    part_lse[rng.random(part_lse.shape) < 0.2] = -np.inf
    part[np.isneginf(part_lse)] = np.nan
    return {
        "x": x,
        "y": {name: normal(d, *lead, *shape) for name, (d, shape) in FLOATS.items()},
        "start": {name: normal(np.float32, *x[name].shape) for name in ACCUMULATED},
        "part": part,
        "part_lse": part_lse,
    }


def program(group: Group) -> Any:
    """Compiled: payload, spec → all that the collectives can do with it."""

    def local(payload: dict[str, Any], spec: GroupCastSpec) -> dict[str, Any]:
        p = jax.tree.map(lambda leaf: leaf[0], payload)
        some = {name: p["y"][name] for name in ACCUMULATED}
        results = {
            "cast": group.cast(p["x"], spec),
            "sum": group.reduce(p["y"], spec),
            "sum onto": group.reduce(some, spec, accumulate=p["start"]),
            "avg": group.reduce(some, spec, op="avg"),
            "lse": group.reduce(p["part"], spec, op="lse", lse=p["part_lse"]),
        }
        return jax.tree.map(lambda leaf: leaf[None], results)

    return group.program(local, (P(AXIS), P()))


def check_sums(got: dict[str, jax.Array], y: dict[str, np.ndarray], transfer: Transfer, start: Any) -> None:
    """Sums of y, onto ``start`` where there is one."""
    for name, total in got.items():
        exact = y[name].astype(np.float64)
        first = start[name].astype(np.float64) if start else np.zeros(total.shape)
        want, size = transfer.reduce_sum(exact, first), transfer.reduce_sum(np.abs(exact), np.abs(first))
        for shard in total.addressable_shards:
            error = np.abs(np.asarray(shard.data).astype(np.float64) - want[shard.index])
            assert (error <= RELATIVE_ERROR[total.dtype.name] * size[shard.index]).all(), name


def check_results(results: dict[str, Any], payload: dict[str, Any], transfer: Transfer) -> None:
    """Rows that nobody sends are zero in the simulation too."""
    assert_equal(results["cast"], {name: transfer.cast(x) for name, x in payload["x"].items()})
    assert [x.dtype for x in results["sum"].values()] == [payload["y"][name].dtype for name in results["sum"]]
    check_sums(results["sum"], payload["y"], transfer, None)
    check_sums(results["sum onto"], payload["y"], transfer, payload["start"])
    counts = np.maximum(transfer.counts(), 1)
    for name, mean in results["avg"].items():
        want = transfer.reduce_sum(payload["y"][name].astype(np.float32))
        want /= counts.reshape(*counts.shape, *[1] * (want.ndim - 2)).astype(np.float32)
        assert_close(mean, want.astype(mean.dtype), 2 * RELATIVE_ERROR[mean.dtype.name])
    out, lse = results["lse"]
    want_out, want_lse = transfer.merge(payload["part"], payload["part_lse"])
    assert_close((out, lse), (np.float32(want_out), np.float32(want_lse)), 1e-5)


def check_patterns(
    group: Group, rounds: int, spec_of: Callable[[GroupCastSpec], Any] = lambda spec: spec
) -> None:
    """All by one compilation, and twice the same to the bit; half of the rounds send rows repeatedly.

    Not so merges of such rows: what one rank sends back for a row is added up in any order on GPUs.
    """
    rng = np.random.default_rng(group.size)
    with jax.enable_x64(True):
        run = program(group)
        for number in range(rounds):
            repeats = number % 2 == 0
            transfer = random_transfer(rng, group.size, repeats=repeats, room_for_repeats=True)
            host = payload(rng, transfer)
            operands = group.shard(host), group.replicate(spec_of(transfer.spec))
            results, again = run(*operands), run(*operands)
            check_results(results, host, transfer)
            for kind, result in results.items():
                if kind != "lse" or not repeats:
                    assert_same_bits(again[kind], result)
        assert run._cache_size() == 1


@on_groups(
    *EVERY,
    Group("native", 2, num_sms=132),
    Group("native", 4, num_sms=1),
    Group(None, 2, ranks_per_host=1),
    Group(None, 4, ranks_per_host=2),
)
def test_random_transfers(group: Group) -> None:
    check_patterns(group, rounds=3 if group.implementation == "xla" else 40)
