"""What the benchmark of collectives measures moves the rows that it says."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks import _jax_collectives, _transfers, collectives
from benchmarks._transfers import Transfer
from jaxmagi.calibration._chain import AXIS, mesh_of, on_ranks
from jaxmagi.calibration._timing import Timing

RANKS, TOKENS = 4, 1024
TRANSFERS = {transfer.name: transfer for transfer in _transfers.transfers(RANKS, TOKENS)}
ANYWHERE = (
    _jax_collectives.PADDED,
    "ours in plain lax",
    "lax.all_to_all",
    "lax.all_gather",
    "lax.psum_scatter",
    "ring of ppermutes",
)


def sent_rows(transfer: Transfer) -> list[list[np.ndarray]]:
    """The rows of a rank's operands that go to a peer, [rank][peer], as the tables of the senders say."""
    spec = transfer.spec
    return [
        [
            np.concatenate(
                [np.arange(row, row + n) for dst, _, row, n, *_ in table if dst == peer and n] or [[]]
            )
            for peer in range(RANKS)
        ]
        for table in np.asarray(spec.sends)
    ]


def arrives(transfer: Transfer) -> np.ndarray:
    """Whether something arrives for an output row: bool [ranks, rows]."""
    found = np.zeros((RANKS, transfer.spec.output_rows), bool)
    for rank, table in enumerate(np.asarray(transfer.spec.receives)):
        for _, _, row, length in table:
            found[rank, row : row + length] = True
    return found


def run(implementation: _jax_collectives.Implementation, rows: np.ndarray) -> list[np.ndarray]:
    """All results [ranks, rows] of operands that say of each row what number it has: [ranks, rows]."""
    xs = tuple(
        np.broadcast_to(rows.reshape(-1, 1, 1), (rows.size, 16 // implementation.arrays, 2)).astype(
            np.float32
        )
        for _ in range(implementation.arrays)
    )
    mesh = mesh_of(RANKS)
    xs, tables = jax.device_put((xs, implementation.tables), NamedSharding(mesh, P(AXIS)))
    found = on_ranks(implementation.run, mesh)(xs, tables)
    for x in jax.tree.leaves(found):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:, :1, :1], x.shape))
    return [np.asarray(x)[:, 0, 0].reshape(RANKS, -1) for x in jax.tree.leaves(found)]


def anywhere(direction: _jax_collectives.Direction) -> list[Any]:
    return [
        pytest.param(transfer, name, id=f"{transfer.name}-{name}")
        for transfer in TRANSFERS.values()
        for name in _jax_collectives.implementations(transfer, direction)
        if name in ANYWHERE
    ]


@pytest.mark.parametrize("transfer, name", anywhere("cast"))
def test_casts(transfer: Transfer, name: str) -> None:
    """Every rank gets what others send to it; what it has of its own beside that is no concern of theirs."""
    implementation = _jax_collectives.implementations(transfer, "cast")[name]
    numbers = 1 + np.arange(RANKS * implementation.rows).reshape(RANKS, -1)
    found = np.concatenate(run(implementation, numbers), axis=1)
    if name == _jax_collectives.PADDED:  # has anything in rows that nothing arrives for
        found = np.where(arrives(transfer), found, 0)
    for rank in range(RANKS):
        expected = [numbers[src][rows[rank].astype(int)] for src, rows in enumerate(sent_rows(transfer))]
        others = found[rank][(found[rank] > 0) & ~np.isin(found[rank], numbers[rank])]
        np.testing.assert_array_equal(np.sort(others), np.sort(np.concatenate(expected)))


@pytest.mark.parametrize("transfer, name", anywhere("reduce f32"))
def test_reductions(transfer: Transfer, name: str) -> None:
    """Each rank gets the sums of what the others have of its rows, some with its own block beside them."""
    implementation = _jax_collectives.implementations(transfer, "reduce f32")[name]
    blocks = implementation.rows // transfer.spec.input_rows
    (found,) = run(implementation, np.ones((RANKS, implementation.rows)))
    counts = np.zeros((RANKS, transfer.spec.input_rows))
    for rank, rows in enumerate(sent_rows(transfer)):
        np.add.at(counts[rank], np.concatenate(rows).astype(int), 1)
    if name == "lax.psum_scatter":
        counts += 1
        assert blocks == RANKS
    if name == "lax.all_to_all":  # its own part, too
        counts = np.ones_like(counts)
    np.testing.assert_array_equal(found, counts)


def test_transfers() -> None:
    """Rows that arrive at a rank."""
    for name, rows in (("all-to-all", 3 * TOKENS // RANKS), ("all-gather", 3 * TOKENS), ("64 KB", 3 * 16)):
        np.testing.assert_array_equal(TRANSFERS[name].received_rows, [rows] * RANKS)
        np.testing.assert_array_equal(TRANSFERS[name].returned_rows, [rows] * RANKS)
    documents = TRANSFERS["documents causal"]
    assert documents.received_rows.sum() == documents.returned_rows.sum() > 0
    assert not np.array_equal(documents.received_rows, documents.returned_rows)
    latency = TRANSFERS["64 KB"]
    np.testing.assert_array_equal(collectives.received_bytes(latency, "cast"), [3 * 64 * 1024] * RANKS)
    np.testing.assert_array_equal(collectives.received_bytes(latency, "reduce f32"), [3 * 128 * 1024] * RANKS)
    returned = documents.returned_rows * 4096
    np.testing.assert_array_equal(collectives.received_bytes(documents, "reduce bf16"), returned)
    with pytest.raises(ValueError, match="30"):
        _transfers.all_to_all(RANKS, 30)


@pytest.mark.parametrize("name", TRANSFERS)
def test_slices_of_ragged_all_to_all(name: str) -> None:
    """By the meaning that `jax.lax.ragged_all_to_all` documents, for it does not run on CPUs."""
    spec = TRANSFERS[name].spec
    row, length, dst_row, received = map(np.asarray, _jax_collectives._slices(spec))
    np.testing.assert_array_equal(received, np.swapaxes(length, 0, 1))
    numbers = 1 + np.arange(RANKS * spec.input_rows).reshape(RANKS, -1)
    found = np.zeros((RANKS, spec.output_rows), int)
    for rank, peer, i in np.ndindex(row.shape):
        begin, n, to = row[rank, peer, i], length[rank, peer, i], dst_row[rank, peer, i]
        found[peer, to : to + n] = numbers[rank, begin : begin + n]
    cast = _jax_collectives.implementations(TRANSFERS[name], "cast")["ours in plain lax"]
    np.testing.assert_array_equal(found, run(cast, numbers)[0])


def row(
    workload: str, direction: _jax_collectives.Direction, name: str, microseconds: float
) -> collectives.Row:
    """Where ours takes 100 microseconds."""
    timings = {name: Timing(*[microseconds * 1e-6] * 3), collectives.OURS: Timing(*[1e-4] * 3)}
    return collectives.to_rows(TRANSFERS[workload], direction, timings)[0]


def test_checks() -> None:
    """The best of those with few multiprocessors counts, and what was not measured is not met."""
    rate = row("all-to-all", "cast", "native, 8 SMs", 10.0)
    many = row("all-to-all", "cast", "native, 32 SMs", 5.0)
    assert rate.gb_per_second == pytest.approx(768 * 4096 / 1e-5 / 1e9)
    latency = row("64 KB", "cast", "native, 4 SMs", 20.0)
    documents = row("documents causal", "cast", _jax_collectives.PADDED, 140.0)
    found = {
        (check.workload, check.direction): check
        for check in collectives.checks([rate, many, latency, documents])
    }
    assert len(found) == 3
    bandwidth = found["all-to-all", "cast"]
    assert bandwidth.measured == rate.gb_per_second and bandwidth.at_least == 330 and not bandwidth.met
    assert found["64 KB", "cast"].met and found["64 KB", "cast"].measured == pytest.approx(20)
    ratio = found["documents causal", "cast"]
    assert ratio.measured == pytest.approx(1.4) and ratio.at_least == 1.5 and not ratio.met
    (missing,) = collectives.checks([row("all-to-all", "reduce bf16", "lax.all_to_all", 1.0)])
    assert missing.measured is None and missing.at_least == 280 and not missing.met


def test_benchmark_in_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tokens", "64", "--ranks", "2", "--processes", "pools", "--repeats", "1"]
    options += ["--rows", "cast, 64", "--implementations", "plain", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["collectives.py", *options])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # to be as it was afterwards
    collectives.main()
    saved = json.loads((tmp_path / "collectives_pools.json").read_text())
    assert saved["environment"]["ranks"] == 2 and saved["environment"]["processes"] == "pools"
    assert saved["environment"]["command"] == f"python -m benchmarks.collectives {' '.join(options)}"
    assert saved["rows"][0]["implementation"] == "ours in plain lax"
    assert "ours in plain lax" in capsys.readouterr().out


def test_benchmark_of_what_runs_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line to JSON and checks; what cannot run here is a failure."""
    monkeypatch.setattr(collectives, "MAX_CALLS", 3)
    options = ["--tokens", "256", "--ranks", "4", "--rows", "cast, doc|bf16, all-to", "--repeats", "2"]
    options += ["--implementations", "native, 16|plain|lax.all_to_all"]
    monkeypatch.setattr(sys, "argv", ["collectives.py", *options, "--out", str(tmp_path)])
    collectives.main()
    saved = json.loads((tmp_path / "collectives_h200.json").read_text())
    assert saved["environment"]["ranks"] == 4 and saved["environment"]["tokens_per_rank"] == 256
    back, lax, native_back, plain, native, *checks = saved["rows"]
    assert [one["implementation"] for one in (back, lax)] == ["ours in plain lax", "lax.all_to_all"]
    assert back["direction"] == lax["direction"] == "reduce bf16" and back["received_bytes"] == 192 * 4096
    assert plain["workload"] == "documents causal" and plain["speedup"] is None
    for failure in (native_back, native):
        assert failure["implementation"] == "native, 16 SMs"
        assert failure["error"].startswith("NotImplementedError")
    assert [check["measured"] for check in checks] == [None, None]
    assert "not measured" in capsys.readouterr().out
