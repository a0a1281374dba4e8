"""The benchmarks ask of the peers what they ask of us, and compare it fairly."""

import numpy as np
import pytest

from benchmarks import _measure, _torch_attention, _workloads, attention
from jaxmagi import AttnMask, masks

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
    found = {workload.name: workload.flops() for workload in _workloads.workloads()}
    for name, area in areas.items():
        assert found[name] == 4 * area * 64 * 128
    assert found["full 16k D192/128"] == 2 * 16_384**2 * 64 * (192 + 128)


def test_shuffled_documents(rng: np.random.Generator) -> None:
    """Each row sees from the begin of its document up to itself, and the bands are not in order."""
    bands = _workloads.shuffled_documents(rng, 60, 12)
    assert bands.shape == (12, 6) and not np.array_equal(bands, np.sort(bands, axis=0))
    lengths = np.diff(np.sort(bands[:, 0]), append=60)
    expected = masks.documents(lengths, "causal").to_dense()
    np.testing.assert_array_equal(AttnMask(bands, 60, 60).to_dense(), expected)


def test_each_candidate_is_first_in_turn() -> None:
    assert "".join(_measure._in_turns("abc", 4)) == "abcbcacababc"


def test_peers_of_short_rows_are_held_against_own_plans() -> None:
    timings = {
        name: _measure.Timing(seconds, seconds, seconds)
        for name, seconds in {"ours": 1e-4, "ours, own plans": 2e-4, "cuDNN": 3e-4}.items()
    }
    short, long = (_workloads.Workload("", _workloads.Causal(length)) for length in (1024, 8192))
    assert attention.to_rows(short, timings)[2].speedup == pytest.approx(1.5)
    assert attention.to_rows(long, timings)[2].speedup == pytest.approx(3)
