"""The other ways to spread attention over ranks that ours is held against are right, and what is measured."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks import _context_peers, _local_bands, context
from benchmarks._workloads import Direction
from jaxmagi import AttnMask, masks
from jaxmagi.attention import attention_reference, attention_reference_vjp
from jaxmagi.calibration._chain import AXIS, mesh_of, on_ranks
from jaxmagi.calibration._timing import Timing
from jaxmagi.masks import geometry
from tests.cases import FP32_TOLERANCE

RANKS, LENGTH, HEADS, KV_HEADS, DIM = 4, 64, 8, 4, 8
MASKS = {
    "full": masks.full(LENGTH),
    "causal": masks.causal(LENGTH),
    "documents causal": masks.documents([7, 1, 30, 3, 14, 9], "causal"),
    "short documents": masks.documents([8] * 8, "full"),  # no rank sees anything of another's
    "window": masks.sliding_window(LENGTH, 11),
    "video": masks.video(4, 16),
}


def test_zigzag() -> None:
    np.testing.assert_array_equal(_local_bands.zigzag(12, 3), [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]])
    with pytest.raises(ValueError, match="20"):
        _local_bands.zigzag(20, 3)


@pytest.mark.parametrize("name", MASKS)
def test_seen(rng: np.random.Generator, name: str) -> None:
    """Any tokens at any places, and places without a token."""
    dense = np.pad(MASKS[name].to_dense(), ((0, 1), (0, 1)))
    stretches = np.split(np.append(np.arange(LENGTH), -1), np.sort(rng.choice(LENGTH, 9, replace=False)))
    queries, keys = (np.concatenate([stretches[i] for i in rng.permutation(10)[:7]]) for _ in range(2))
    found = _local_bands.seen(np.asarray(MASKS[name].bands), queries, keys)
    np.testing.assert_array_equal(
        geometry.to_dense(found, len(queries), len(keys)), dense[np.ix_(queries, keys)]
    )


def problem(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Query, key, value and cotangent in global order."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return tuple(rng.normal(size=(LENGTH, n, DIM)).astype(np.float32) for n in heads)


def solve(method: _context_peers.Method, operands: tuple[np.ndarray, ...]) -> tuple[Any, ...]:
    """The output and the gradients, in global order; gradients of keys that all ranks hold, added up."""
    query, key, value, dout = operands
    tokens = method.tokens.reshape(-1)
    shared = method.key_rows == LENGTH

    def place(x: np.ndarray) -> np.ndarray:
        return np.tile(x, (RANKS, 1, 1)) if shared else x[tokens]

    def both_passes(query: Any, key: Any, value: Any, dout: Any, tables: Any) -> tuple[Any, ...]:
        out, pullback = jax.vjp(lambda *xs: method.attend(*xs, tables), query, key, value)
        return out, *pullback(dout)

    mesh = mesh_of(RANKS)
    arguments = (query[tokens], place(key), place(value), dout[tokens], method.tables)
    arguments = jax.device_put(arguments, NamedSharding(mesh, P(AXIS)))
    out, dq, dk, dv = map(np.asarray, on_ranks(both_passes, mesh)(*arguments))
    home = np.argsort(tokens)
    dkv = [x.reshape(RANKS, LENGTH, *x.shape[1:]).sum(0) if shared else x[home] for x in (dk, dv)]
    return out[home], dq[home], *dkv


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("method", _context_peers.METHODS)
def test_methods_against_dense_attention(rng: np.random.Generator, method: str, name: str) -> None:
    mask: AttnMask = MASKS[name]
    operands = problem(rng)
    query, key, value, dout = operands
    found = solve(_context_peers.METHODS[method](mask, RANKS, None), operands)
    out, _ = attention_reference(query, key, value, mask)
    gradients = attention_reference_vjp(query, key, value, mask, dout)
    expected = (out, gradients.query, gradients.key, gradients.value)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=4 * FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_benchmark_of_what_runs_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direction: Direction
) -> None:
    """Small workloads from the command line to JSON, checks and plot."""
    monkeypatch.setattr(context, "PROGRAM_SECONDS", 1e-12)
    options = ["--pass", direction, "--tokens", "32", "--ranks", "4", "--rows", "documents"]
    options += ["--methods", "ours|ring", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["context.py", *options, "--out", str(tmp_path)])
    context.main()
    rows = json.loads((tmp_path / f"{context.NAMES[direction]}.json").read_text())["rows"]
    ours, ring, check = rows
    assert (ours["implementation"], ring["implementation"]) == ("ours", "ring")
    assert check["workload"] == ours["workload"] == "documents causal, 0k a GPU"
    assert check["implementation"] == "best of the others"
    assert check["measured"] == pytest.approx(ring["median_ms"] / ours["median_ms"])
    assert (tmp_path / f"{context.NAMES[direction]}.png").stat().st_size > 5_000


def test_flops_are_those_of_a_rank() -> None:
    (workload,) = [one for one in context.workloads(64, 4) if one.name.startswith("causal")]
    (row,) = context.to_rows(workload, "forward", 4, {"ours": Timing(2.0, 1.0, 3.0)})
    assert row.tflops == pytest.approx(256 * 257 / 2 * 4 * 64 * 128 / 4 / 2 / 1e12)
    assert (row.median_ms, row.fastest_ms, row.slowest_ms, row.speedup) == (2000, 1000, 3000, 1)


def test_ours_is_held_against_the_best_of_the_others() -> None:
    """But not against the kernel alone."""
    seconds = {"ours": 1.0, "ring": 3.0, "all-gather": 0.9, "kernel alone": 0.5}
    timings = {name: Timing(value, value, value) for name, value in seconds.items()}
    rows = [
        row
        for workload in context.workloads(64, 4)
        for row in context.to_rows(workload, "forward", 4, timings)
    ]
    found = context.checks("forward", rows)
    assert [check.workload for check in found] == ["documents causal, 0k a GPU", "window 1023, 0k a GPU"]
    assert all(check.measured == pytest.approx(0.9) and not check.met for check in found)
