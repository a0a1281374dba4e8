"""Each benchmark runs small from its command line to results of the committed format."""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from benchmarks import (
    _hosts,
    _measure,
    _overlap_products,
    _report,
    _workloads,
    attention,
    attention_cpu,
    attention_memory,
    collectives,
    context,
    context_hosts,
    context_memory,
    hosts,
    overlap,
    sharding,
    train_curve,
)
from jaxmagi.calibration import _chain
from tests.collectives.groups import require_hosts
from tests.compiling.described import COMPILER, ENVIRONMENT
from tests.test_examples import SMALL

type Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def defaults_of_jax() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a benchmark and returns the rows that it saves, which have the fields of committed results.

    They are those of the same name, unless ``committed`` is another one, or None where there are none yet.
    """

    def run(
        benchmark: ModuleType, name: str, options: str, committed: str | None = ""
    ) -> list[dict[str, Any]]:
        arguments = options.replace("OUT", f"--out {tmp_path}").split(" ")
        monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__.partition('.')[2]}.py", *arguments])
        benchmark.main()
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        assert saved["environment"]["command"] == f"python -m {benchmark.__name__} {' '.join(arguments)}"
        if committed is None:
            return saved["rows"]
        known = json.loads((_measure.RESULTS / f"{committed or name}.json").read_text())["rows"]
        known += [vars(_report.Failure("", "", "", "")), vars(_report.check("", "", "", None))]
        assert {tuple(row) for row in saved["rows"]} <= {tuple(row) for row in known}
        return saved["rows"]

    return run


def test_attention(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are not installed are failures, which meet no requirement."""
    workload = _workloads.Workload("causal 8k D128", _workloads.Causal(64), 16, 16)
    monkeypatch.setattr(attention, "workloads", lambda: [workload])
    for name in ("MEASURED_SECONDS_SHORT", "REPEATED_SECONDS"):
        monkeypatch.setattr(attention, name, 1e-9)
    monkeypatch.setitem(attention.BATCH_SECONDS, "backward", 1e-9)
    monkeypatch.setitem(sys.modules, "torch", None)
    options = "--pass backward --rows causal --peers ^cuDNN$ --repeats 2 OUT"
    results = run(attention, "attention_backward_cpu", options, committed="attention_backward_h100")
    ours, own_plans, deterministic, cudnn, *checks = results
    assert ours["implementation"] == "ours" and own_plans["implementation"] == "ours, own plans"
    assert deterministic["speedup"] == pytest.approx(deterministic["median_ms"] / ours["median_ms"])
    assert cudnn["error"] == "not installed: torch"
    measured = [(check["implementation"], check["measured"]) for check in checks]
    expected = [
        ("cuDNN", None),
        *[("FlexAttention", None), ("FlexAttention FLASH", None)] * 2,  # required, and the goal
        *[("FlashAttention-4", None)] * 2,
        ("ours, deterministic", deterministic["speedup"]),
    ]
    assert measured == expected and not any(check["met"] for check in checks[:-1])


def test_attention_cpu(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attention_cpu, "LENGTH", 128)
    monkeypatch.setattr(attention_cpu, "DOCUMENT", 32)
    memory = {"mask": "", "direction": "", "implementation": "", "peak_gb": 0.0}
    monkeypatch.setattr(attention_cpu, "peak_memory", lambda _: memory)
    monkeypatch.setattr(attention_cpu, "save", functools.partial(_measure.save, folder=tmp_path))
    rows = run(attention_cpu, "attention_cpu", "--repeats 1 --save")
    assert [row["implementation"] for row in rows[:6]] == ["ffi", "xla", "jax.nn"] * 2


def test_attention_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([1, 10**9])  # the CPU counts nothing
    monkeypatch.setattr(attention_memory, "peak_bytes", lambda: next(peaks))
    monkeypatch.setattr(attention_memory, "LENGTH", 256)
    (row,) = run(attention_memory, "attention_memory_cpu", "OUT", committed="attention_memory_h200")
    query, key = 256 * 64 * 128 * 2, 256 * 8 * 128 * 2
    assert row["operands"] == 2 * query + 2 * key and row["gradients"] == query + 2 * key
    assert row["needed"] == row["operands"] + query + row["gradients"] + 2 * query
    assert row["compiled"] >= row["needed"] - row["float32_dq"]
    assert row["peak"] == 10**9 and not row["met"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_context(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direction: _workloads.Direction
) -> None:
    monkeypatch.setattr(context, "PROGRAM_SECONDS", 1e-12)
    monkeypatch.setattr(context, "TURN_SECONDS", 1e-3)
    options = f"--pass {direction} --tokens 32 --ranks 4 --rows documents --methods ours|ring --repeats 2 OUT"
    name = context.NAMES[direction]
    ours, ring, check = run(context, f"{name}_cpu", options, committed=f"{name}_h200")
    assert (ours["implementation"], ring["implementation"]) == ("ours", "ring")
    assert check["measured"] == pytest.approx(ring["median_ms"] / ours["median_ms"])
    assert (tmp_path / f"{name}_cpu.png").exists()


def test_collectives(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # to be as it was afterwards
    options = (
        "--tokens 64 --ranks 2 --processes pools --repeats 1 --rows cast,.64 --implementations plain OUT"
    )
    row, check = run(collectives, "collectives_pools", options, committed="collectives_h200")
    assert row["implementation"] == "ours in plain lax" and row["received_bytes"] == 16 * 4096
    assert check["measured"] is None and not check["met"]


@pytest.mark.parametrize("direction", ["reduce-scatter", "all-gather"])
def test_overlap(run: Run, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """Without a GPU ours fails, and rivals have the values of XLA's sequence."""
    monkeypatch.setattr(overlap, "SIZES", ((128, 16, 24),))
    monkeypatch.setattr(overlap, "TURN_SECONDS", 1e-3)
    monkeypatch.setattr(overlap, "PROGRAM_SECONDS", 1e-12)
    options = f"--rows {direction},.128 --implementations ours|XLA|2|alone --repeats 1 OUT"
    xla, chunks, product, transfer, ours, *checks = run(overlap, "overlap_cpu", options, committed=None)
    assert ours["error"].startswith("NotImplementedError")
    assert (chunks["implementation"], product["of_ideal"], xla["speedup"]) == ("2 chunks by hand", None, None)
    ideal = max(product["median_us"], transfer["median_us"])
    assert xla["of_ideal"] == pytest.approx(ideal / xla["median_us"])
    assert [each["met"] for each in checks] == [False] * 4


def test_overlap_of_an_mlp() -> None:
    """XLA's sequence of both passes has the gradients of one device."""
    workload = _overlap_products.Workload("", "both passes", 64, 8, 16)
    mesh = _chain.mesh_of(4)
    way = _overlap_products.ways(workload, mesh.size)["XLA's sequence"]
    x, up, down = (array.astype(jax.numpy.float32) for array in way.operands(mesh))
    found = _chain.on_ranks(lambda *operands: way.run(operands, ()), mesh)(x, up, down)

    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        ups, downs = (w.reshape(4, -1, w.shape[-1]) for w in (up, down))
        return sum((jax.nn.gelu(x @ u) @ d).sum() for u, d in zip(ups, downs, strict=True))  # pyright: ignore[reportReturnType]

    whole = [jax.numpy.asarray(jax.device_get(array)) for array in (x, up, down)]
    for ours, wanted in zip(found, jax.grad(loss, (0, 1, 2))(*whole), strict=True):
        assert jax.numpy.allclose(jax.device_get(ours), wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("direction", ["reduce-scatter", "all-gather"])
def test_ways_to_multiply_agree(direction: Any) -> None:
    workload = _overlap_products.Workload("", direction, 64, 8, 16)
    mesh = _chain.mesh_of(4)
    found = {
        name: _chain.on_ranks(lambda x, w, run=way.run: run((x, w), ()), mesh)(*way.operands(mesh))
        for name, way in _overlap_products.ways(workload, mesh.size).items()
        if "XLA" in name or "chunks" in name
    }
    first, *others = (x.astype(jax.numpy.float32) for x in jax.tree.leaves(found))
    assert len(others) == 3 and all(jax.numpy.allclose(first, x, atol=0.1, rtol=0.02) for x in others)


def test_context_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on the CPU, which counts no peak."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # to be as it was afterwards
    options = "--tokens 64 --rows window OUT"
    forward, both = run(context_memory, "context_memory_2", options, "context_memory_8_described")
    query, key, margin = 64 * 64 * 128 * 2, 64 * 8 * 128 * 2, 1024
    assert (forward["direction"], both["direction"]) == ("forward", "both passes")
    assert 0 < forward["argument_bytes"] - (query + 2 * key) < margin  # a plan's tables
    assert both["argument_bytes"] - forward["argument_bytes"] == query
    assert 0 <= forward["output_bytes"] - query < margin
    assert 0 <= both["output_bytes"] - (query + 2 * key) < margin
    assert forward["peak_bytes"] is None and both["temporary_bytes"] > 0


@pytest.mark.skipif(not COMPILER.is_dir(), reason="needs XLA's compiler for GPUs, which .ci/run installs")
def test_context_memory_of_gpus_that_are_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a host have no pair buffers: received rows, at most one shard, are put behind the own ones."""
    for name, value in (ENVIRONMENT | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}).items():
        monkeypatch.setenv(name, value)  # to be as it was afterwards
    monkeypatch.setenv("PYTHONPATH", str(COMPILER), prepend=os.pathsep)
    options = "--described --tokens 4096 --rows forward,.causal OUT"
    (row,) = run(context_memory, "context_memory_2_described", options, "context_memory_8_described")
    shard = 2 * 4096 * 8 * 128 * 2  # keys and values
    assert shard < row["temporary_bytes"] < 3 * shard


def run_on_hosts(arguments: argparse.Namespace) -> None:
    """Runs a rank of `hosts` with less work."""
    hosts.NETWORK_SHAPE, _hosts.PROGRAM_SECONDS = (256, (128,)), 1e-9
    run_rank(arguments)


run_rank = hosts.run


def run_context_on_hosts(arguments: argparse.Namespace) -> None:
    """Runs a rank of `context_hosts` with less work."""
    _hosts.PROGRAM_SECONDS = context.PROGRAM_SECONDS = 1e-12
    context.TURN_SECONDS = 1e-3
    run_context_rank(arguments)


run_context_rank = context_hosts.run


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requires two hosts of one rank each, and has variables that their benchmarks set as they were."""
    require_hosts(2, 2)
    for name, value in (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"), ("NCCL_NVLS_ENABLE", "0")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("two_hosts")
def test_hosts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU nothing is counted."""
    monkeypatch.setattr(hosts, "run", run_on_hosts)
    options = "--tokens 256 --rows causal --repeats 1 OUT"
    cast, back, *checks = run(hosts, "hosts_2x1", options)
    assert [row["workload"] for row in (cast, back)] == ["causal, 256 a rank"] * 2
    assert 2 * cast["needed_bytes"] == back["needed_bytes"] > 0
    bound = 1.1 * cast["needed_bytes"] / cast["network_gb_per_second"] / 1e3 + 200
    assert cast["bound_us"] == pytest.approx(bound)
    assert cast["ratio"] == pytest.approx(cast["median_us"] / bound)
    assert [check["measured"] for check in checks[::2]] == [cast["ratio"], back["ratio"]]


@pytest.mark.usefixtures("two_hosts")
def test_context_hosts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is measured once, and the passes of ours are held against the rest."""
    monkeypatch.setattr(context_hosts, "run", run_context_on_hosts)
    options = "--tokens 64 --rows window --repeats 1 OUT"
    *rows, forward, backward = run(context_hosts, "context_hosts_2x1", options)
    times = {(row["direction"], row["implementation"]): row["median_ms"] for row in rows}
    cast, back = times["cast", "group_cast"], times["reduce f32", "group_reduce"]
    bounds = {
        ("forward", "ours"): max(times["forward", "kernel alone"], cast),
        ("backward", "ours"): max(times["backward", "kernel alone"], cast + back),
        ("backward", "ours, keys kept"): max(times["backward", "kernel alone"], back),
    }
    assert len(times) == len(rows) == 7 and {row["workload"] for row in rows} == {"window 4095, 64 a rank"}
    for row in rows:
        least = bounds.get((row["direction"], row["implementation"]))
        assert row["bound_ms"] == (least and pytest.approx(least))
    found = [check["measured"] for check in (forward, backward)]
    ours = [each for each in bounds if each[1] == "ours"]
    assert found == [pytest.approx(times[each] / bounds[each]) for each in ours]
    assert [check["at_most"] for check in (forward, backward)] == [1.15, 1.15]


def test_sharding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "VOCABULARY", 256)
    monkeypatch.setattr(sharding, "STEPS", 1)
    options = "--tokens 64 --width 128 --layers 1 --batch 1 --repeats 1 --rows documents,.(one|heads) OUT"
    one, heads, *checks = run(sharding, "sharding", options)
    assert [row["workload"] for row in (one, heads)] == ["documents, one GPU", "documents, heads over 2 GPUs"]
    assert heads["ratio"] == pytest.approx(heads["tokens_per_second"] / one["tokens_per_second"])
    assert [check["measured"] for check in checks] == [0, heads["ratio"]]


@pytest.mark.parametrize(
    ("options", "name", "labels"),
    [
        ("", "train_curve_cpu", ["ffi", "xla"]),
        ("--context 2 ", "train_curve_context_cpu", ["ffi, 2 devices", "ffi"]),
        ("--context 2 --processes ", "train_curve_processes", ["ffi, 2 processes on 8 device(s)", "ffi"]),
    ],
)
def test_train_curve(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: str, name: str, labels: list[str]
) -> None:
    monkeypatch.setattr(train_curve, "OPTIONS", [*SMALL, "--layers=1", *train_curve.OPTIONS])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    first, second, comparison = run(train_curve, name, f"{options}--steps 6 OUT", name.replace("cpu", "h200"))
    assert [first["label"], second["label"]] == labels and comparison["met"]
    assert len(first["losses"]) == 6 and first["losses"][-1] < first["losses"][0]
    assert first["losses"] != second["losses"]  # they round in different places, so they did run both
