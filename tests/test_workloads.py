"""The benchmarks ask of the peers what they ask of us, and compare it fairly."""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmagi
from benchmarks import _jax_attention, _torch_attention, _workloads, attention
from jaxmagi import AttnMask, flops, masks
from jaxmagi.calibration._timing import Timing

SMALL = [
    _workloads.Full(30),
    _workloads.Causal(30),
    _workloads.Documents((7, 1, 22), causal=True),
    _workloads.Documents((7, 1, 22), causal=False),
    _workloads.Window(30, 5),
    _workloads.SharedPrefix(6, 4, 6),
    _workloads.Video(3, 10),
]


@pytest.mark.parametrize("pattern", SMALL, ids=repr)
def test_predicate_of_flex_attention(monkeypatch: pytest.MonkeyPatch, pattern: _workloads.Pattern) -> None:
    monkeypatch.setattr(_torch_attention, "_segments", lambda x: np.repeat(np.arange(len(x)), x))
    query, key = np.mgrid[:30, :30]
    seen = _torch_attention._mask_mod(pattern)(0, 0, query, key)
    np.testing.assert_array_equal(seen, pattern.mask().to_dense())


def test_flops() -> None:
    """The area of the masks, by hand."""
    areas = {
        "causal 8k D128": 8192 * 8193 // 2,
        "window 1023": 1024 * 1025 // 2 + (32_768 - 1024) * 1024,
        "shared prefix 4k+14x2k": 4096 * 4097 // 2 + 14 * (2048 * 4096 + 2048 * 2049 // 2),
        "video 4x21600": 21_600**2 * 10,
        "documents 16x2048 causal": 16 * 2048 * 2049 // 2,
    }
    found = {workload.name: workload for workload in _workloads.workloads("forward")}
    for name, area in areas.items():
        assert found[name].flops("forward") == 4 * area * 64 * 128
        assert found[name].flops("backward") == 10 * area * 64 * 128
    wide = found["full 16k D192/128"]
    assert wide.flops("forward") == 2 * 16_384**2 * 64 * (192 + 128)
    assert wide.flops("backward") == 2 * 16_384**2 * 64 * (3 * 192 + 2 * 128)


def test_flops_are_those_of_the_library() -> None:
    workload = _workloads.Workload("", _workloads.Documents((7, 1, 22), causal=True))
    mask = workload.pattern.mask()
    assert workload.flops("forward") == flops(mask, 64, 128, mode="fwd")
    assert workload.flops("backward") == flops(mask, 64, 128, mode="bwd")


def test_backward_has_the_rows_of_the_forward_and_short_documents() -> None:
    forward, backward = (_workloads.workloads(direction) for direction in ("forward", "backward"))
    (short,) = [workload for workload in backward if workload not in forward]
    assert len(backward) == len(forward) + 1
    lengths = np.array(short.pattern.lengths)  # pyright: ignore[reportAttributeAccessIssue]
    assert lengths.sum() == 32_768 and abs(lengths.mean() - 256) < 8
    assert len(set(np.cumsum(lengths)[:-1] % 128)) > 40  # tiles of 128 do not end where documents do


def test_shuffled_documents(rng: np.random.Generator) -> None:
    """Each row sees from the begin of its document up to itself, and the bands are not in order."""
    bands = _workloads.shuffled_documents(rng, 60, 12)
    assert bands.shape == (12, 6) and not np.array_equal(bands, np.sort(bands, axis=0))
    lengths = np.diff(np.sort(bands[:, 0]), append=60)
    expected = masks.documents(lengths, "causal").to_dense()
    np.testing.assert_array_equal(AttnMask(bands, 60, 60).to_dense(), expected)


def test_peers_of_short_rows_are_held_against_own_plans() -> None:
    timings = {
        name: Timing(seconds, seconds, seconds)
        for name, seconds in {"ours": 1e-4, "ours, own plans": 2e-4, "cuDNN": 3e-4}.items()
    }
    short, long = (_workloads.Workload("", _workloads.Causal(length)) for length in (1024, 8192))
    assert attention.to_rows("forward", short, timings)[2].speedup == pytest.approx(1.5)
    assert attention.to_rows("forward", long, timings)[2].speedup == pytest.approx(3)


def test_rates_on_another_workload_are_compared_by_its_own_operations() -> None:
    prefix = next(w for w in _workloads.workloads("forward") if w.name == "shared prefix 4k+14x2k")
    other = _workloads.held_against(prefix, "forward")
    assert other is not None and _workloads.held_against(prefix, "backward") is None
    seconds = {"ours": 4e-3, _jax_attention.ours_on(other.name): 8e-3}
    timings = {name: Timing(value, value, value) for name, value in seconds.items()}
    ours, elsewhere = attention.to_rows("forward", prefix, timings)
    assert elsewhere.tflops == pytest.approx(other.flops("forward") / 8e-3 / 1e12)
    assert elsewhere.speedup == pytest.approx(ours.tflops / elsewhere.tflops)


def test_deterministic_is_held_against_what_shares_its_plan_too() -> None:
    timings = {
        name: Timing(seconds, seconds, seconds)
        for name, seconds in {"ours": 1e-4, "ours, own plans": 2e-4, "ours, deterministic": 1.2e-4}.items()
    }
    short = _workloads.Workload("", _workloads.Causal(1024))
    row = attention.to_rows("backward", short, timings)[2]
    assert row.speedup == pytest.approx(1.2)
    assert row.tflops == pytest.approx(short.flops("backward") / 1.2e-4 / 1e12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_layers_of_a_program_fit_into_memory(direction: _workloads.Direction) -> None:
    """Queries, outputs and gradients of all layers, ours and a peer's, within half of a card."""
    found = {
        workload.name: attention.num_layers(direction, workload, workload.flops(direction) / 600e12)
        for workload in _workloads.workloads(direction)
    }
    for workload in _workloads.workloads(direction):
        assert found[workload.name] >= 1
        assert 6 * found[workload.name] * workload.query_bytes() < 35e9
    assert found["causal 1k D128"] == 32 and found["full 32k D128"] == 1
    if direction == "backward":
        assert found[_workloads.SHORT_DOCUMENTS] == 7


SMALL_WORKLOAD = _workloads.Workload("small", _workloads.Documents((40, 24), causal=True), 16, 8)


@pytest.mark.parametrize("name", ["ours", "ours, own plans", "ours, deterministic"])
def test_gradients_of_ours(name: str) -> None:
    """What is measured are the gradients of each layer, for the same cotangent."""
    num_layers = 3
    work = _jax_attention.candidates(SMALL_WORKLOAD, "backward")[name](SMALL_WORKLOAD, num_layers)
    own, (key, value, cotangent) = _jax_attention.operands(SMALL_WORKLOAD, num_layers, "backward")
    found = work.enqueue()
    work.wait(found)
    assert work.passes == num_layers and len(found) == num_layers
    for (query, out, _), gradients in zip(own, found, strict=True):
        attend = functools.partial(
            jaxmagi.attention, mask=SMALL_WORKLOAD.pattern.mask(), implementation="ffi"
        )
        expected_out, pullback = jax.vjp(attend, query, key, value)
        np.testing.assert_array_equal(out, expected_out)
        jax.tree.map(np.testing.assert_array_equal, gradients, pullback(cotangent))


def test_benchmark_of_what_runs_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backward pass of small workloads from the command line to JSON, checks and plot."""
    small = {"full 8k D128": _workloads.Full(64), "causal 8k D128": _workloads.Causal(64)}
    rows = [_workloads.Workload(name, pattern, 16, 16) for name, pattern in small.items()]
    monkeypatch.setattr(attention, "workloads", lambda _: rows)
    monkeypatch.setattr(attention, "BATCH_SECONDS", {"backward": 1e-9})
    monkeypatch.setattr(attention, "MEASURED_SECONDS_SHORT", 1e-9)
    monkeypatch.setattr(attention, "REPEATED_SECONDS", 1e-9)
    monkeypatch.setitem(sys.modules, "torch", None)
    options = ["--pass", "backward", "--rows", "causal", "--peers", "^cuDNN$", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["attention.py", *options, "--out", str(tmp_path)])
    attention.main()
    saved = json.loads((tmp_path / "attention_backward_h200.json").read_text())
    ours, own_plans, deterministic, cudnn, *checks = saved["rows"]
    assert ours["implementation"] == "ours" and own_plans["implementation"] == "ours, own plans"
    assert ours["direction"] == "backward" and ours["workload"] == "causal 8k D128"
    assert deterministic["speedup"] == pytest.approx(deterministic["median_ms"] / ours["median_ms"])
    assert cudnn["error"] == "not installed: torch"
    assert {check["workload"] for check in checks} == {"causal 8k D128"}
    kinds = {(check["kind"], check["implementation"]): check["measured"] for check in checks}
    assert kinds == {
        ("required", "cuDNN"): None,
        ("goal", "FlashAttention-4"): None,
        ("required", "ours, deterministic"): deterministic["speedup"],
    }
    assert "not measured" in capsys.readouterr().out
    assert (tmp_path / "attention_backward_h200.png").stat().st_size > 5_000
