"""Pictures of plans."""

import builtins
from collections.abc import Iterator
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.planning import plan_context

from .oracle import builder_masks


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    matplotlib.use("agg")
    yield
    plt.close("all")


@pytest.mark.parametrize("name", builder_masks())
def test_draw_shows_the_mask(name: str) -> None:
    mask = builder_masks()[name]
    plan = plan_context(mask, 4, chunk_size=16)
    image = np.asarray(plan.draw().images[0].get_array())
    background = np.array([0xF3, 0xF4, 0xF6]) / 255
    np.testing.assert_array_equal(np.abs(image - background).max(axis=-1) > 1e-6, mask.to_dense())


def test_report_and_draw_of_dense_masks_on_many_ranks() -> None:
    """Rows by rows, what ranks receive here would take 4 GB."""
    plan = plan_context(masks.full(1 << 20), 1024)
    report = plan.report()
    assert (report.rows_received == (1 << 20) - (1 << 10)).all()
    assert report.redundant_rows == 0
    image = np.asarray(plan.draw().images[0].get_array())
    assert (np.abs(image - np.array([0xF3, 0xF4, 0xF6]) / 255).max(axis=-1) > 1e-6).all()


def test_draw_into_axes_and_long_or_empty_sequences() -> None:
    _, ax = plt.subplots()
    assert plan_context(masks.causal(1 << 14), 8).draw(ax) is ax
    plan_context(masks.full(0), 2).draw()


def test_draw_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"jaxmagi\[plot\]"):
        plan_context(masks.causal(8), 2).draw()
