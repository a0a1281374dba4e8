"""The commands of ``python -m jaxmagi``: numbers against `ContextPlan.report`, pictures, errors."""

import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from jaxmagi import ContextPlan, CostModel, _hopper, _native, masks, plan_context
from jaxmagi._cli import _doctor, main
from jaxmagi._cli._cost import write_cost
from jaxmagi._cli._table import format_bytes
from jaxmagi.collectives._support import CAST, REDUCE
from jaxmagi.planning._report import schedule_pass

from .cases import DATA, document_lengths

ROOT = Path(__file__).parent.parent
HISTOGRAM = str(DATA / "document_lengths.csv")
CAUSAL = ["plan", "--mask", "causal", "--tokens", "512", "--cp", "4"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("300\n20, 100\n\n0\n92\n")
    return str(path)


@pytest.fixture
def parents(tmp_path: Path) -> str:
    path = tmp_path / "parents.txt"
    path.write_text("-1\n0, 0\n2\n-1\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns what a command prints, which must succeed."""
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def rows(printed: str) -> dict[str, list[str]]:
    """Returns the cells of the table's rows, by the first cell."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines())
    return {name: cells for name, *cells in lines if len(cells) == 6}


def check_printed(printed: str, plan: ContextPlan, cost: CostModel = CostModel()) -> None:  # noqa: B008
    """Checks every row of the table and the totals against the report."""
    report = plan.report(cost)
    table = rows(printed)
    per_rank = np.stack([report.area, report.rows_sent, report.rows_received], axis=1)
    expected = {str(rank): numbers for rank, numbers in enumerate(per_rank)}
    expected |= {"smallest": per_rank.min(0), "mean": per_rank.mean(0), "largest": per_rank.max(0)}
    assert table.pop("rank")[:3] == ["area", "/ mean", "rows sent"]
    assert {"smallest", "mean", "largest"} < set(table)
    for name, cells in table.items():
        area, *counts = expected[name]
        sizes = [format_bytes(count * cost.row_bytes) for count in counts]
        counts = [f"{count:,.0f}" for count in counts]
        assert cells == [f"{area:,.0f}", f"{area / report.area.mean():.3f}", *counts, *sizes]
    received, network = (
        x.mean() / plan.shard_length for x in (report.rows_received, report.network_rows_received)
    )
    for text in (
        f"{report.imbalance:.4f} (largest / mean area), of predicted attention "
        f"{report.work_imbalance:.4f}, backward {report.backward_work_imbalance:.4f}",
        f"{received:.4f} of a rank's own rows (mean), {network:.4f} from other hosts",
        *(
            f"{name}  {link.rows:,} rows; {format_bytes(link.bytes_moved / plan.cp_size)} a rank (mean) in "
            f"both passes, {format_bytes(link.busiest_bytes)} sent or received by the busiest"
            for name, link in (
                ("within hosts ", report.within_hosts),
                ("between hosts", report.between_hosts),
            )
        ),
        f"levels         {f'two, hosts of {plan.ranks_per_host}' if plan.two_levels else 'one'} ",
        f"forward pass   {report.predicted_seconds * 1e3:.3f} ms predicted",
        f"backward pass  {report.predicted_backward_seconds * 1e3:.3f} ms predicted",
    ):
        assert text in printed


TOKENS = ["--tokens", "700"]
VIDEO = ["--num-chunks", "7", "--tokens-per-chunk", "100"]
PREFIX = ["--prefix", "200", "--lengths", "FILE"]
TREE = ["--parents", "PARENTS", "--lengths", "FILE"]
DRAWN = ["--lengths", HISTOGRAM, "--tokens", "5000"]
MASKS = {
    "causal": (TOKENS, masks.causal(700)),
    "full": (TOKENS, masks.full(700)),
    "sliding-window": ([*TOKENS, "--left", "90"], masks.sliding_window(700, 90)),
    "sliding-window right": ([*TOKENS, "--left", "-1", "--right", "7"], masks.sliding_window(700, -1, 7)),
    "video": (VIDEO, masks.video(7, 100)),
    "video range": ([*VIDEO, "--kv-range", "2"], masks.video(7, 100, 2)),
    "shared-prefix": (PREFIX, masks.shared_prefix(200, [300, 20, 100, 0, 92])),
    "prefix-tree": (TREE, masks.prefix_tree([-1, 0, 0, 2, -1], [300, 20, 100, 0, 92])),
    "documents": (["--lengths", "FILE"], masks.documents([300, 20, 100, 0, 92])),
    "documents drawn": (DRAWN, masks.documents(document_lengths(5000))),
}


@pytest.mark.parametrize("case", MASKS)
def test_plan_prints_the_report(
    case: str, lengths: str, parents: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, mask = MASKS[case]
    options = [{"FILE": lengths, "PARENTS": parents}.get(option, option) for option in options]
    printed = run(capsys, "plan", "--mask", case.split()[0], *options, "--cp", "4")
    assert set(rows(printed)) >= {"0", "1", "2", "3"}
    check_printed(printed, plan_context(mask, 4))


def test_options_of_the_plan_and_of_the_attention(capsys: pytest.CaptureFixture[str]) -> None:
    attention = ["--heads", "6", "--kv-heads", "2", "--head-dim", "48", "--bytes-per-element", "4"]
    attention += ["--bytes-per-gradient", "2", "--ranks-per-host", "3"]
    printed = run(capsys, *CAUSAL, "--chunk-size", "16", *attention)
    cost = CostModel(
        num_heads=6, num_kv_heads=2, head_dim=48, bytes_per_element=4, bytes_per_gradient=2, ranks_per_host=3
    )
    assert (cost.row_bytes, cost.gradient_row_bytes) == (2 * 2 * 48 * 4, 2 * 2 * 48 * 2)
    check_printed(printed, plan_context(masks.causal(512), 4, chunk_size=16, cost=cost), cost)
    check_printed(run(capsys, *CAUSAL), plan_context(masks.causal(512), 4))


@pytest.mark.parametrize(("option", "two_levels"), [("auto", "auto"), ("yes", True), ("no", False)])
def test_levels(option: str, two_levels: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, *CAUSAL, "--two-levels", option, "--ranks-per-host", "2")
    cost = CostModel(ranks_per_host=2)
    check_printed(printed, plan_context(masks.causal(512), 4, two_levels=two_levels, cost=cost), cost)


def test_speeds_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = CostModel(
        tflops=123.4,
        link_gb_per_second=5,
        num_heads=16,
        num_kv_heads=2,
        ranks_per_host=2,
        bytes_per_gradient=2,
    )
    write_cost(cost, tmp_path / "cost.json")
    printed = run(capsys, *CAUSAL, "--cost", str(tmp_path / "cost.json"))
    check_printed(printed, plan_context(masks.causal(512), 4, cost=cost), cost)
    cost = replace(cost, num_heads=6)
    printed = run(capsys, *CAUSAL, "--cost", str(tmp_path / "cost.json"), "--heads", "6")
    check_printed(printed, plan_context(masks.causal(512), 4, cost=cost), cost)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ("[680]", "must be a JSON object with attributes of CostModel (tflops, "),
        ('{"tflop": 680}', "must be a JSON object with attributes of CostModel (tflops, "),
        ('{"tflops": "680"}', "CostModel.tflops must be from 1e-12 to 1e12, but it is '680'"),
        ('{"bytes_per_gradient": 0}', "CostModel.bytes_per_gradient must be from 1e-12 to 1e12, but it is 0"),
        ('{"num_kv_heads": 7}', "CostModel.num_heads=64 is no multiple of num_kv_heads=7"),
    ],
)
def test_bad_speeds_of_a_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cost.json").write_text(text)
    check_error([*CAUSAL, "--cost", str(tmp_path / "cost.json")], message, capsys)


def test_many_ranks_show_the_extremes(capsys: pytest.CaptureFixture[str]) -> None:
    mask = masks.documents(document_lengths(20_000))
    printed = run(
        capsys, "plan", "--mask", "documents", "--lengths", HISTOGRAM, "--tokens", "20000", "--cp", "64"
    )
    plan = plan_context(mask, 64)
    check_printed(printed, plan)
    shown = [int(name) for name in rows(printed) if name.isdigit()]
    assert f"{len(shown)} of 64 ranks" in printed
    assert len(shown) <= 16
    report = plan.report()
    for values in (report.area, report.rows_received):
        assert {values.min(), values.max()} <= set(values[shown].tolist())


def test_drawn_lengths_of_a_list_fill_the_tokens(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--mask", "documents", "--lengths", lengths, "--tokens", "2000", "--cp", "4"]
    printed = run(capsys, *arguments)
    assert "2,000 on 4 ranks" in printed
    assert run(capsys, *arguments) == printed


def test_a_plan_without_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has one document of one token."""
    path = tmp_path / "ones.csv"
    path.write_text("1,1,1,1")
    documents = ["plan", "--mask", "documents", "--lengths", str(path), "--cp", "4"]
    printed = run(capsys, *documents, "--out", str(tmp_path / "pictures"))
    assert rows(printed)["largest"] == ["1", "1.000", "0", "0", "0 B", "0 B"]


@pytest.mark.parametrize(("cp", "kv_heads"), [(1, 8), (4, 1), (4, 8), (70, 2)])
def test_pictures_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cp: int, kv_heads: int
) -> None:
    out = tmp_path / "new" / "folder"
    options = ["--tokens", "9000", "--left", "2000", "--cp", str(cp), "--kv-heads", str(kv_heads)]
    printed = run(capsys, "plan", "--mask", "sliding-window", *options, "--out", str(out))
    for name in ("mask", "ranks", "timeline"):
        assert str(out / f"{name}.png") in printed
        image = matplotlib.image.imread(out / f"{name}.png")
        assert image.shape[:2] == (810, 1440)
        assert image[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("kv_heads", "ranks_per_host", "parts"), [(1, 2, 1), (2, 2, 2), (4, 2, 4), (4, 4, 2)]
)
def test_schedule_waits_for_keys_and_ends_with_the_prediction(
    kv_heads: int, ranks_per_host: int, parts: int
) -> None:
    cost = CostModel(num_kv_heads=kv_heads, ranks_per_host=ranks_per_host)
    plan = plan_context(masks.causal(32768), 4)
    schedule = schedule_pass(np.asarray(plan.bands), plan.transfer, cost, cost.forward)
    fetches, attention = schedule.fetches, schedule.attention
    assert schedule.seconds == plan.report(cost).predicted_seconds == attention[..., 1].max()
    assert (fetches[0, 0], fetches.shape, attention.shape[::2]) == (0, (parts, 2), (4, 2))
    np.testing.assert_array_equal(fetches[1:, 0], fetches[:-1, 1])
    assert (np.diff(attention.reshape(4, -1)) >= 0).all()
    waits = schedule.launched >= 0
    np.testing.assert_array_equal(schedule.launched[waits], range(parts))
    assert (attention[:, waits, 0] >= fetches[:, 1]).all()
    assert (attention[:, 0, 0] == 0).all()


WINDOW = ["--mask", "sliding-window"]
INVALID = [
    (["--tokens", "0"], "argument --tokens: '0' is not an integer from 1 to"),
    (["--tokens", "many"], "argument --tokens: 'many' is not an integer from 1 to"),
    (["--tokens", str(2**31)], f"'{2**31}' is not an integer"),
    (["--cp", "2.5"], "argument --cp: '2.5'"),
    (["--chunk-size", "129"], "= 128, but it is 129"),
    (["--two-levels", "maybe"], "argument --two-levels: invalid choice: 'maybe'"),
    (["--kv-heads", "7"], "--heads 64 is no multiple of --kv-heads 7"),
    (["--head-dim", "0"], "argument --head-dim: '0'"),
    (["--left", "3"], "--left 3 is not for --mask causal"),
    (["--mask", "dense"], "argument --mask: invalid choice: 'dense'"),
    (WINDOW, "--mask sliding-window needs --left"),
    ([*WINDOW, "--left", "1", "--right", "-2"], "argument --right: '-2'"),
    (["--mask", "video"], "--mask video needs --num-chunks"),
    (["--mask", "shared-prefix", "--lengths", HISTOGRAM], "--mask shared-prefix needs --prefix"),
    (["--mask", "prefix-tree", "--lengths", HISTOGRAM], "--mask prefix-tree needs --parents"),
    (["--mask", "documents", "--lengths", "/no/such/file"], "/no/such/file"),
    (["--cost", "/no/such/file"], "/no/such/file"),
    (["--out", HISTOGRAM], HISTOGRAM),
    (["--out", ""], "argument --out: the path is empty"),
    (["--cost", ""], "argument --cost: the path is empty"),
    (["--mask", "documents", "--lengths", ""], "argument --lengths: the path is empty"),
    (["--cp", str(2**30)], "cp_size must be between 1 and 4096, but it is"),
    (["--tok", "3"], "unrecognized arguments: --tok 3"),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_bad_options_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_error([*CAUSAL, *options], message, capsys)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", [], "has no lengths"),
        ("12\nx3\n", [], "line 2: 'x3' is not an integer"),
        ("12\n4, -5\n", [], "line 2: '-5' is not an integer"),
        ("0\n0", [], "has 0 tokens"),
        ("range,number\n", [], "has no lengths"),
        ('range,number\n"[0, 10]",5\n', [], "is a histogram: give --tokens"),
        ("range,number\n7,5\n", [], "a row of the histogram is"),
        ('range,number\n"[0, 10]",x\n', [], "a row of the histogram is"),
        ('range,count\n"[0, 10]",5\n', [], "a row of the histogram is"),
        *(
            (f'range,number\n"{bad}",5\n', [], f"'{bad}' is not [from, to] with integers 0 <= from <= to <=")
            for bad in (
                "[20, 10]",
                "[-20, -10]",
                "[0, 1e20]",
                "[0, 1e400]",
                "[0, 1.5]",
                "[true, 3]",
                "[0, NaN]",
            )
        ),
        ('range,number\n"[1, 2, 3]",5\n', [], "a row of the histogram is"),
        (f"{2**30}\n{2**30}", [], "the sum of lengths must be between"),
        ("0", ["--tokens", "9"], "has no length above 0"),
        ("\udcff\udcfe12", [], "is not text"),
    ],
)
def test_bad_files_of_lengths(
    content: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(content, errors="surrogateescape")
    documents = ["plan", "--mask", "documents", "--lengths", str(path), "--cp", "2"]
    check_error([*documents, *options], message, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no parents"),
        ("-1\n0, -2\n", "line 2: '-2' is not an integer from -1"),
        ("\udcff\udcfe12", "is not text"),
        ("-1, 0", "parents and lengths must have one length, but they have 2 and 5"),
        ("-1, 0, 1, 3, 0", "parents[3] = 3 is neither -1 nor the index of a segment before segment 3"),
    ],
)
def test_bad_files_of_parents(
    content: str, message: str, lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(content, errors="surrogateescape")
    tree = ["plan", "--mask", "prefix-tree", "--lengths", lengths, "--parents", str(path), "--cp", "2"]
    check_error(tree, message, capsys)


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    check_error([], "COMMAND", capsys)
    check_error(["diagnose"], "'diagnose'", capsys)
    check_error(["plan", "--mask", "causal", "--tokens", "9"], "--cp", capsys)
    check_error(["calibrate", "--out", ""], "argument --out: the path is empty", capsys)


def check_error(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a command exits with status 2 after a message."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("rich", "plan needs rich: pip install jaxmagi[cli]"),
        ("matplotlib", "--out needs matplotlib: pip install jaxmagi[plot]"),
    ],
)
def test_missing_packages_say_what_to_install(
    module: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main([*CAUSAL, "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"python -m jaxmagi plan: {message}\n")


def test_missing_planner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(_native._EXTENSIONS, "cpu", None)
    assert main(CAUSAL) == 1
    assert "needs the compiled extension jaxmagi._cpu, which is missing" in capsys.readouterr().err
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"jaxmagi._cpu +not built", printed)
    assert re.search(r'"ffi" on cpu +cannot run: the compiled extension jaxmagi._cpu is missing', printed)
    assert re.search(r'"xla" on cpu +runs\n', printed)


def test_doctor_without_devices_and_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    known = _doctor._version
    monkeypatch.setattr(_doctor, "_version", lambda name: None if name == "rich" else known(name))
    monkeypatch.setattr(_doctor, "_devices", fail)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "Unable to initialize backend 'tpu'" in printed
    assert re.search(r"rich +not installed: pip install jaxmagi\[cli\]", printed)


@pytest.mark.parametrize(
    ("kind", "capability", "built", "reason"),
    [
        ("NVIDIA H200", "9.0", True, None),
        ("NVIDIA H200", "9.0", False, "jaxmagi was built without CUDA"),
        ("NVIDIA A100", "8.0", True, "NVIDIA A100 has compute capability 8.0"),
    ],
)
def test_doctor_judges_gpus(
    kind: str,
    capability: str,
    built: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The devices are stand-ins, which the checks of the lowering see."""
    gpu = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
    handlers = {target: {} for target in (CAST, REDUCE)}
    module: Any = types.SimpleNamespace(
        registrations=lambda: handlers, collective_statistics=dict, __file__="_cuda.abi3.so"
    )
    monkeypatch.setitem(_native._EXTENSIONS, "cuda", module if built else None)
    monkeypatch.setattr(_hopper, "local_gpus", lambda: [gpu])
    monkeypatch.setattr(_doctor, "_devices", lambda: {"cpu": [], "cuda": [gpu, gpu]})
    printed = run(capsys, "doctor")
    assert f"2 x {kind}, compute capability {capability}" in printed
    for name, limits in (("ffi", r" \(bfloat16"), ("native", r" \(between GPUs of one host"), ("nccl", "")):
        verdict = f"runs{limits}" if reason is None else f"cannot run: {reason}"
        assert re.search(rf'"{name}" on cuda +{verdict}', printed)
    assert len(re.findall(r'"xla" on cuda +runs\n', printed)) == 2


def test_commands_without_the_device_that_jax_is_told_to_use() -> None:
    """JAX passes over "cuda" where there is no GPU and fails without words, or says why it cannot start."""
    hidden = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    message = (
        "(JAX finds no device on the platforms of JAX_PLATFORMS=cuda|Unable to initialize backend 'cuda')"
    )
    result = run_program("doctor", **hidden)
    assert (result.returncode, result.stderr) == (1, "")
    assert re.search(rf"^Devices\n  error  {message}", result.stdout, flags=re.MULTILINE)
    result = run_program("calibrate", **hidden)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.match(f"python -m jaxmagi calibrate: {message}", result.stderr)


def run_program(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxmagi", command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_doctor_as_a_program() -> None:
    result = run_program("doctor")
    assert result.returncode == 0, result.stderr
    for package in ("jaxmagi", "jax", "jaxlib", "python"):
        assert re.search(rf"^  {package} +\d+\.\d+", result.stdout, flags=re.MULTILINE)
    assert re.search(r"jaxmagi._cpu +loaded, 2 handlers", result.stdout)
    assert re.search(r'"ffi" on cpu +runs\n', result.stdout)
