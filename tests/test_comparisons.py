"""Benchmarks compare what they say: peers compute the same, operations are counted alike, checks hold."""

import functools
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmagi
from benchmarks import (
    _context_peers,
    _jax_attention,
    _jax_collectives,
    _torch_attention,
    _transfers,
    _workloads,
    attention,
    collectives,
    context,
    context_hosts,
    sharding,
    train_curve,
)
from benchmarks._decoder import Sizes
from benchmarks._report import Failure
from jaxmagi import flops
from jaxmagi.attention import attention_reference, attention_reference_vjp
from jaxmagi.calibration._chain import AXIS, mesh_of, on_ranks
from jaxmagi.calibration._timing import Timing
from tests.cases import FP32_TOLERANCE

RANKS, LENGTH, HEADS, KV_HEADS, DIM = 4, 64, 8, 4, 8
PATTERNS = [
    _workloads.Full(LENGTH),
    _workloads.Causal(LENGTH),
    _workloads.Documents((7, 1, 30, 3, 14, 9), causal=True),
    _workloads.Documents((8,) * 8, causal=False),  # spread over ranks, none sees anything of another's
    _workloads.Window(LENGTH, 11),
    _workloads.SharedPrefix(16, 4, 12),
    _workloads.Video(4, 16),
]
IN_PLAIN_LAX = "ours in plain lax"
ANYWHERE = {_jax_collectives.PADDED, IN_PLAIN_LAX, "ring of ppermutes"}
ANYWHERE |= {f"lax.{name}" for name in ("all_to_all", "all_gather", "psum_scatter")}
TRANSFERS = {transfer.name: transfer for transfer in _transfers.transfers(RANKS, 1024)}


def same(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds)


# --- attention ---


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_flex_attention_gets_the_same_mask(monkeypatch: pytest.MonkeyPatch, pattern: Any) -> None:
    monkeypatch.setattr(_torch_attention, "_segments", lambda x: np.repeat(np.arange(len(x)), x))
    predicate = _torch_attention._mask_mod(pattern)
    np.testing.assert_array_equal(predicate(0, 0, *np.mgrid[:LENGTH, :LENGTH]), pattern.mask().to_dense())


def test_operations_are_those_of_the_library() -> None:
    for pattern in PATTERNS:
        workload, mask = _workloads.Workload("", pattern), pattern.mask()
        assert workload.flops("forward") == flops(mask, 64, 128, mode="fwd")
        assert workload.flops("backward") == flops(mask, 64, 128, mode="bwd")


@pytest.mark.parametrize("name", ["ours", "ours, own plans", "ours, deterministic"])
def test_backward_work_is_the_gradients_of_each_layer(name: str) -> None:
    workload = _workloads.Workload("small", _workloads.Documents((40, 24), causal=True), 16, 8)
    work = _jax_attention.candidates(workload, "backward")[name](workload, 3)
    separate, (key, value, cotangent) = _jax_attention.operands(workload, 3, "backward")
    found = work.enqueue()
    assert work.passes == len(found) == 3
    attend = functools.partial(jaxmagi.attention, mask=workload.pattern.mask(), implementation="ffi")
    for (query, out, _), gradients in zip(separate, found, strict=True):
        expected_out, pullback = jax.vjp(attend, query, key, value)
        np.testing.assert_array_equal(out, expected_out)
        jax.tree.map(np.testing.assert_array_equal, gradients, pullback(cotangent))


def test_speedups_of_attention() -> None:
    """Short rows count a schedule for each layer; other workloads count their own operations."""
    seconds = {"ours": 1e-4, "ours, own plans": 2e-4, "cuDNN": 3e-4, "ours, deterministic": 1.2e-4}
    timings = {name: same(value) for name, value in seconds.items()}
    for length, expected in ((1024, [0.5, 1, 1.5, 1.2]), (8192, [1, 2, 3, 1.2])):
        workload = _workloads.Workload("", _workloads.Causal(length))
        found = attention.to_rows("backward", workload, timings)
        assert [row.speedup for row in found] == pytest.approx(expected)
    prefix = next(w for w in _workloads.workloads() if w.name == "shared prefix 4k+14x2k")
    other = _workloads.held_against(prefix, "forward")
    assert other is not None
    timings = {"ours": same(4e-3), _jax_attention.ours_on(other.name): same(8e-3)}
    ours, elsewhere = attention.to_rows("forward", prefix, timings)
    assert elsewhere.tflops == pytest.approx(other.flops("forward") / 8e-3 / 1e12)
    assert elsewhere.speedup == pytest.approx(ours.tflops / elsewhere.tflops)


# --- context parallelism ---


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("name", _context_peers.METHODS)
def test_methods_against_dense_attention(rng: np.random.Generator, name: str, pattern: Any) -> None:
    """Gradients of keys that all ranks hold are added up."""
    mask, heads = pattern.mask(), (HEADS, KV_HEADS, KV_HEADS, HEADS)
    query, key, value, dout = (rng.normal(size=(LENGTH, n, DIM)).astype(np.float32) for n in heads)
    method = _context_peers.METHODS[name](mask, RANKS, None)
    tokens, shared = method.tokens.reshape(-1), method.key_rows == LENGTH

    def both_passes(query: Any, key: Any, value: Any, dout: Any, tables: Any) -> tuple[Any, ...]:
        out, pullback = jax.vjp(lambda *xs: method.attend(*xs, tables), query, key, value)
        return out, *pullback(dout)

    keys = [np.tile(x, (RANKS, 1, 1)) if shared else x[tokens] for x in (key, value)]
    operands = (query[tokens], *keys, dout[tokens], method.tables)
    mesh = mesh_of(RANKS)
    found = on_ranks(both_passes, mesh)(*jax.device_put(operands, NamedSharding(mesh, P(AXIS))))
    out, dq, *dkv = map(np.asarray, found)
    home = np.argsort(tokens)
    dkv = [x.reshape(RANKS, *key.shape).sum(0) if shared else x[home] for x in dkv]
    gradients = attention_reference_vjp(query, key, value, mask, dout)
    expected = (
        attention_reference(query, key, value, mask)[0],
        gradients.query,
        gradients.key,
        gradients.value,
    )
    for x, y in zip((out[home], dq[home], *dkv), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=4 * FP32_TOLERANCE, rtol=0)


def test_ours_is_compared_with_the_best_peer() -> None:
    """The kernel alone is no peer. Operations are those of a rank."""
    seconds = {"ours": 1.0, "ring": 3.0, "all-gather": 0.9, "kernel alone": 0.5}
    timings = {name: same(value) for name, value in seconds.items()}
    rows = [row for w in context.workloads(64, 4) for row in context.to_rows(w, "forward", 4, timings)]
    found = context.checks("forward", rows)
    assert [check.workload for check in found] == ["documents causal, 0k a GPU", "window 1023, 0k a GPU"]
    assert all(check.measured == pytest.approx(0.9) and not check.met for check in found)
    causal = next(row for row in rows if row.workload.startswith("causal"))
    assert causal.tflops == pytest.approx(256 * 257 / 2 * 4 * 64 * 128 / 4 / 1e12)


def test_bounds_between_hosts() -> None:
    """The kernel bounds the forward pass, and the backward pass both transfers, one after the other."""
    moves = context_hosts.MOVES
    seconds = {
        **{("forward", "ours"): 4.1, ("forward", "kernel alone"): 4.0, moves["cast"]: 3.0},
        **{("backward", "ours"): 10.0, ("backward", "kernel alone"): 8.0, moves["reduce f32"]: 6.0},
    }
    rows = context_hosts.to_rows("causal, 32k a rank", {each: same(time) for each, time in seconds.items()})
    bounds = {(row.direction, row.implementation): row.bound_ms for row in rows if row.bound_ms is not None}
    assert bounds == {("forward", "ours"): 4000, ("backward", "ours"): 9000}
    found = [(x.measured, x.at_most, x.met) for x in context_hosts.checks(rows)]
    assert found == [(pytest.approx(4.1 / 4), 1.05, True), (pytest.approx(10 / 9), 1.08, False)]


# --- collectives ---


def move(implementation: _jax_collectives.Implementation, rows: np.ndarray) -> np.ndarray:
    """Returns the results [ranks, rows] for operands that say of each row what number it has."""
    shape = (rows.size, 16 // implementation.arrays, 2)
    x = np.broadcast_to(rows.reshape(-1, 1, 1), shape).astype(np.float32)
    mesh = mesh_of(RANKS)
    operands = (x,) * implementation.arrays, implementation.tables
    found = on_ranks(implementation.run, mesh)(*jax.device_put(operands, NamedSharding(mesh, P(AXIS))))
    arrays = [np.asarray(x) for x in jax.tree.leaves(found)]
    assert all((x == x[:, :1, :1]).all() for x in arrays)
    return np.concatenate([x[:, 0, 0].reshape(RANKS, -1) for x in arrays], axis=1)


@pytest.mark.parametrize("name", TRANSFERS)
def test_collectives_that_cast(name: str) -> None:
    """Each peer brings the rows that ours brings; some bring a rank its own rows too."""
    found = _jax_collectives.implementations(TRANSFERS[name], "cast")
    ours = found[IN_PLAIN_LAX]
    numbers = 1 + np.arange(RANKS * ours.rows).reshape(RANKS, -1)
    expected = move(ours, numbers)
    for peer in found.keys() & ANYWHERE:
        moved = move(found[peer], numbers)
        if peer == _jax_collectives.PADDED:  # has anything in rows that nothing arrives for
            np.testing.assert_array_equal(moved[expected > 0], expected[expected > 0])
            continue
        for rank, (rows, those_of_ours) in enumerate(zip(moved, expected, strict=True)):
            received = rows[(rows > 0) & ~np.isin(rows, numbers[rank])]
            np.testing.assert_array_equal(np.sort(received), np.sort(those_of_ours[those_of_ours > 0]))


@pytest.mark.parametrize("name", TRANSFERS)
def test_collectives_that_reduce(name: str) -> None:
    """Each peer makes the sums of ours, or adds a rank's own block, or nothing at all."""
    found = _jax_collectives.implementations(TRANSFERS[name], "reduce f32")
    sums = {peer: move(x, np.ones((RANKS, x.rows))) for peer, x in found.items() if peer in ANYWHERE}
    expected = sums.pop(IN_PLAIN_LAX)
    different = {"lax.psum_scatter": expected + 1, "lax.all_to_all": np.ones_like(expected)}
    for peer, x in sums.items():
        np.testing.assert_array_equal(x, different.get(peer, expected))


def test_checks_of_collectives() -> None:
    """Bytes are those that arrive; the best with few multiprocessors counts; the unmeasured is not met."""
    cases: list[tuple[str, _jax_collectives.Direction, str, float]] = [
        ("all-to-all", "cast", "native, 8 SMs", 1e-5),
        ("all-to-all", "cast", "native, 32 SMs", 5e-6),
        ("documents causal", "cast", _jax_collectives.PADDED, 1.4e-4),
        ("64 KB", "cast", "native, 4 SMs", 2e-5),
        ("all-to-all", "reduce bf16", "lax.all_to_all", 1e-6),
    ]
    rows = [
        collectives.to_rows(TRANSFERS[name], direction, {each: same(time), collectives.OURS: same(1e-4)})[0]
        for name, direction, each, time in cases
    ]
    assert rows[0].gb_per_second == pytest.approx(768 * 4096 / 1e-5 / 1e9)
    found = [(x.measured, x.met) for x in collectives.checks(rows)]
    assert found == [
        (rows[0].gb_per_second, False),
        (None, False),
        (pytest.approx(1.4), False),
        (pytest.approx(20), True),
    ]


# --- training ---


@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_sharded_set_ups_train_alike() -> None:
    """Losses of several steps agree, devices send each other sums alone, and ratios are to one GPU."""
    sizes = Sizes(layers=1, width=128, heads=16, key_heads=4, vocabulary=256)
    shapes = {"one GPU": (1, 1), "batch over 2 GPUs": (2, 1), "heads over 2 GPUs": (1, 2)}
    cases = [sharding.Case("documents", name, "jaxmagi", *shape, 4) for name, shape in shapes.items()]
    trainers = {case.name: sharding.Trainer(case, 64, sizes) for case in cases}
    one, batch, heads = (
        [each.first_loss, *(float(each.step()) for _ in range(3))] for each in trainers.values()
    )
    assert one[0] == pytest.approx(np.log(256), rel=0.02) and one[-1] < one[0] - 0.005
    np.testing.assert_allclose([batch, heads], [one, one], atol=1e-3)
    rows = sharding.to_rows(trainers, {case.name: same(1 / (i + 1)) for i, case in enumerate(cases)})
    assert [row.collectives.keys() for row in rows] == [set(), {"all-reduce"}, {"all-reduce"}]
    assert [row.ratio for row in rows] == pytest.approx([1, 2, 3])
    failed = Failure("documents, heads over 2 GPUs", "training step", "jaxmagi", "out of memory")
    found = sharding.checks([*rows[:2], failed])
    assert [(x.measured, x.met) for x in found] == [(0, True), (2, True), (None, False), (None, False)]


def test_gathered_is_what_has_a_number_for_each_token() -> None:
    found = {"all-gather bf16[2,64,4,8]": 3, "all-to-all f32[2,32]": 1, "collective-permute f32[8,8]": 2}
    others = {"all-reduce f32[2,64,128]": 6, "reduce-scatter f32[4096]": 1, "all-gather s32[63]": 1}
    assert sharding.gathered(Counter(found | others | {"all-gather f32[]": 1}), 64) == found


def test_losses_that_are_no_numbers_do_not_agree() -> None:
    def compare(first: list[float], second: list[float]) -> train_curve.Comparison:
        return train_curve.compare(train_curve.Curve("", 1.0, first), train_curve.Curve("", 1.0, second))

    assert compare([2.0, 4.0, 1.0], [2.0, 4.04, 0.992]).met
    assert not compare([2.0, 4.0, 1.0], [2.0, 4.05, 1.0]).met
    assert not compare([2.0, np.nan, 1.5], [2.0, 2.0, 1.5]).met
