"""Pictures of masks: painted cells agree with the mask, at every size."""

import sys
from collections.abc import Iterator

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.path import Path

from jaxmagi import masks
from jaxmagi.masks import AttnMask

from .dense import any_bands


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def _shapes(ax: Axes) -> list[Path]:
    (collection,) = (c for c in ax.collections if isinstance(c, PolyCollection))
    return list(collection.get_paths())


def _painted(ax: Axes, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns whether the middle of each cell of ``queries x keys`` lies in a shape."""
    q, k = np.meshgrid(queries, keys, indexing="ij")
    points = np.column_stack([k.ravel(), q.ravel()]) + 0.5
    inside = [path.contains_points(points) for path in _shapes(ax)]
    return np.any(inside, axis=0).reshape(q.shape) if inside else np.zeros(q.shape, bool)


def test_small_masks_are_drawn_cell_by_cell(rng: np.random.Generator) -> None:
    for _ in range(20):
        q_len, kv_len = rng.integers(1, 33, 2).tolist()
        mask = AttnMask.from_bands(any_bands(rng, q_len, kv_len, 4), q_len=q_len, kv_len=kv_len, check=False)
        painted = _painted(mask.draw(plt.figure().gca()), np.arange(q_len), np.arange(kv_len))
        np.testing.assert_array_equal(painted, mask.to_dense())
        plt.close("all")


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(1000, 1500),
        masks.sliding_window(1000, 200, 50),
        masks.sliding_window(1500, -1, 100, kv_len=800),
        masks.documents([300, 20, 500], "causal"),
        masks.video(6, 200, 3),
        AttnMask.from_slices([(0, 400), (400, 1000)], [(100, 900), (0, 800)], [3, 2]),
    ],
    ids=["causal", "window", "short keys", "documents", "video", "slices"],
)
def test_large_masks_follow_their_cells(mask: AttnMask) -> None:
    """Straight edges through the middle of the steps differ from the cells on the edge itself only."""
    queries, keys = np.arange(3, mask.q_len, 7), np.arange(2, mask.kv_len, 7)
    painted = _painted(mask.draw(), queries, keys)
    dense = np.pad(mask.to_dense(), 1, mode="edge")
    around = [dense[1 + dq :, 1 + dk :] for dq in (-1, 0, 1) for dk in (-1, 0, 1)]
    views = np.array([view[queries][:, keys] for view in around])
    np.testing.assert_array_equal(painted[views.all(0)], True)
    np.testing.assert_array_equal(painted[~views.any(0)], False)


def test_axes_of_the_user_and_labels() -> None:
    _, ax = plt.subplots()
    mask = masks.documents([30_000] * 50)
    assert mask.draw(ax) is ax
    assert len(_shapes(ax)) == 50
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 1.5e6), (1.5e6, 0))  # queries downwards
    assert "key" in ax.get_xlabel() and "query" in ax.get_ylabel()
    ax.figure.canvas.draw()
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert "0" in labels and "200k" in labels and "1M" in labels


@pytest.mark.parametrize("mask", [masks.full(0), masks.full(3, 0), masks.from_segment_ids([0] * 500)])
def test_empty_masks(mask: AttnMask) -> None:
    ax = mask.draw()
    ax.figure.canvas.draw()
    assert not _shapes(ax)


def test_stacked_masks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"draw takes masks with bands \[S, 6\]"):
        AttnMask.stack([masks.full(4)]).draw()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install jaxmagi\[plot\]"):
        masks.full(4).draw()
