"""The set-ups of the benchmark of sharded training steps train alike, and it reports what it measures."""

import dataclasses
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import sharding
from benchmarks._decoder import Sizes
from benchmarks._rows import Failure
from benchmarks.sharding import CAUSAL, CUDNN, DIRECTION, DOCUMENTS, MASKS, OURS, Case, Setup, Trainer
from jaxmagi.calibration._timing import Timing

TOKENS = 64
SIZES = Sizes(layers=1, width=128, heads=16, key_heads=4, vocabulary=256)


@pytest.fixture(autouse=True)
def defaults_of_jax() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def make_trainer(data: int, tensor: int) -> Trainer:
    """Makes a trainer for four examples of packed documents, over data x tensor devices."""
    setup = Setup(f"{data} x {tensor}", data, tensor, examples=4)
    return sharding.make_trainer(Case(DOCUMENTS, setup, OURS), MASKS[DOCUMENTS](TOKENS), SIZES)


def test_set_ups_train_alike() -> None:
    """Losses of several steps agree, and devices send each other sums alone."""
    trainers = [make_trainer(*shape) for shape in ((1, 1), (2, 1), (1, 2))]
    one, batch, heads = ([each.first_loss, *(float(each.step()) for _ in range(3))] for each in trainers)
    assert one[0] == pytest.approx(np.log(SIZES.vocabulary), rel=0.02) and one[-1] < one[0] - 0.005
    np.testing.assert_allclose(batch, one, atol=1e-3)
    np.testing.assert_allclose(heads, one, atol=1e-3)
    one, batch, heads = (sharding.collective_names(each.text) for each in trainers)
    assert not one and batch.keys() == heads.keys() == {"all-reduce"}


def test_gathered_is_what_has_a_number_for_each_token() -> None:
    found = {"all-gather bf16[2,64,4,8]": 3, "all-to-all f32[2,32]": 1, "collective-permute f32[8,8]": 2}
    others = {"all-reduce f32[2,64,128]": 6, "reduce-scatter f32[4096]": 1, "all-gather s32[63]": 1}
    assert sharding.gathered(Counter(found | others | {"all-gather f32[]": 1}), 64) == found


def test_ratios_and_checks() -> None:
    """Ratios are to one GPU with the same implementation, and what failed meets nothing."""
    setups = sharding.setups(gpus=2, batch=2)
    cases = [Case(CAUSAL, setup, name) for name in (OURS, CUDNN) for setup in setups]
    trainers = {case.name: dataclasses.replace(make_trainer(1, 1), case=case) for case in cases}
    timings = {case.name: Timing(1 / (i + 1), 0.1, 2.0) for i, case in enumerate(cases)}
    rows = sharding.to_rows(trainers, timings)
    assert [row.ratio for row in rows] == pytest.approx([1, 2, 3, 1, 5 / 4, 6 / 4])
    assert rows[1].tokens == 4 * TOKENS and rows[1].tokens_per_second == pytest.approx(2 * 4 * TOKENS)
    gathers = dataclasses.replace(rows[1], gathered={"all-gather bf16[2,64,4,8]": 3}, ratio=1.8)
    failed = Failure(rows[2].workload, DIRECTION, OURS, "out of memory")
    found = sharding.checks([*rows, gathers, failed])
    assert [check.implementation for check in found] == ["arrays gathered", "one GPU"] * 4
    assert [check.measured for check in found] == [0, 2, 0, 3, 3, 1.8, None, None]
    assert [check.met for check in found] == [True] * 4 + [False] * 4
    assert [check.at_least for check in found][1::2] == [1.9, 1.6, 1.9, 1.6]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict:
    """Runs the benchmark from the command line at small sizes, and returns what it saves."""
    monkeypatch.setattr(sharding, "VOCABULARY", SIZES.vocabulary)
    monkeypatch.setattr(sharding, "STEPS", 1)
    small = [
        "--tokens",
        str(TOKENS),
        "--width",
        str(SIZES.width),
        "--layers",
        "1",
        "--batch",
        "1",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["sharding.py", *small, *options, "--out", str(folder)])
    sharding.main()
    return json.loads((folder / "sharding_h200.json").read_text())


def test_benchmark_on_two_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = run(monkeypatch, tmp_path, "--rows", "documents, (one|heads)")
    assert saved["environment"]["tokens"] == TOKENS and saved["environment"]["key_heads"] == 4
    one, heads, *checks = saved["rows"]
    names = ["documents, one GPU", "documents, heads over 2 GPUs"]
    assert [row["workload"] for row in (one, heads)] == names
    assert one["implementation"] == heads["implementation"] == OURS
    assert one["tokens"] == heads["tokens"] == TOKENS
    assert one["collectives"] == {} and heads["collectives"].keys() == {"all-reduce"}
    assert heads["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert heads["ratio"] == pytest.approx(heads["tokens_per_second"] / one["tokens_per_second"])
    assert [check["measured"] for check in checks] == [0, heads["ratio"]]
    assert names[1] in capsys.readouterr().out


def test_benchmark_on_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The peer is a failure on CPUs."""
    ours, cudnn = run(monkeypatch, tmp_path, "--gpus", "1", "--rows", "causal")["rows"]
    assert ours["workload"] == cudnn["workload"] == "causal, one GPU"
    assert ours["ratio"] == 1 and cudnn["error"] == "RuntimeError: cuDNN is not detected."
