"""The comparison of loss curves, and that both implementations see the same training."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import train_curve
from benchmarks.train_curve import Curve, compare
from tests.test_examples import SMALL


def test_largest_difference_is_relative_to_the_second() -> None:
    first, second = Curve("ffi", 1.0, [2.0, 4.0, 1.0]), Curve("xla", 1.0, [2.0, 4.04, 0.992])
    found = compare(first, second)
    assert found.curves == ("ffi", "xla") and found.step == 1 and found.met
    assert found.largest_relative_difference == pytest.approx(0.04 / 4.04)
    assert not compare(first, Curve("xla", 1.0, [2.0, 4.05, 1.0])).met


def test_no_number_is_no_agreement() -> None:
    found = compare(Curve("ffi", 1.0, [2.0, np.nan, 1.5]), Curve("xla", 1.0, [2.0, 2.0, 1.0]))
    assert found.step == 1 and found.largest_relative_difference == np.inf and not found.met


def test_masks_of_one_capacity() -> None:
    train_lm = train_curve.example()
    sequences = list(itertools.islice(train_lm.packed_batches(2048, 1), 200))
    counts = {len(sequence.lengths) for (sequence,) in sequences}
    assert 8 in counts and 9 in counts and max(counts) <= train_curve.CAPACITY
    for each in sequences[:20]:
        batch = train_lm.local_batch(each, 256)
        found = train_curve.padded(batch)
        for mask, expected in ((found.window, batch.window), (found.full, batch.full)):
            assert mask.bands.shape == (1, train_curve.CAPACITY, 6) and mask.area() == expected.area()


@pytest.mark.parametrize(
    ("run", "ranks", "name", "labels"),
    [
        (train_curve.run, None, "train_curve_h200", ("ffi", "xla")),
        (train_curve.run, 2, "train_curve_context_h200", ("ffi, 2 devices", "ffi")),
        (train_curve.run_all, 2, "train_curve_processes", ("ffi, 2 processes on 8 device(s)", "ffi")),
    ],
)
def test_curves_of_the_example(
    run: Callable[[list[str], int | None, Path], None],
    ranks: int | None,
    name: str,
    labels: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # What the example does, it does under JAX's own defaults.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        run([*SMALL, "--attention-dtype=bfloat16"], ranks, tmp_path)
    saved = json.loads((tmp_path / f"{name}.json").read_text())
    first, second, comparison = saved["rows"]
    assert (first["label"], second["label"]) == labels
    assert len(first["losses"]) == len(second["losses"]) == 6
    assert first["losses"][-1] < first["losses"][0]
    assert first["losses"] != second["losses"]  # they round in different places, so they did run both
    assert comparison["met"] and "met" in capsys.readouterr().out
    assert "--attention-dtype=bfloat16" in saved["environment"]["example"]
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
