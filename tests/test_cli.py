"""The commands of ``python -m jaxmagi``: numbers against `ContextPlan.report`, pictures, refusals."""

import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from jaxmagi import ContextPlan, CostModel, _hopper, _native, masks, plan_context
from jaxmagi._cli import _doctor, main
from jaxmagi._cli._cost import write_cost
from jaxmagi._cli._table import format_bytes
from jaxmagi.collectives import _cuda
from jaxmagi.planning._report import schedule_stages

from .cases import DATA, document_lengths

ROOT = Path(__file__).parent.parent
HISTOGRAM = str(DATA / "document_lengths.csv")
CAUSAL = ["plan", "--mask", "causal", "--tokens", "512", "--cp", "4"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("300\n20, 100\n\n0\n92\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def rows(printed: str) -> dict[str, list[str]]:
    """The cells of the table's rows by the first one."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines())
    return {name: cells for name, *cells in lines if len(cells) == 6}


def check_printed(printed: str, plan: ContextPlan, cost: CostModel = CostModel()) -> None:  # noqa: B008
    """Every row of the table, and the totals, are those of the report."""
    report = plan.report(cost)
    table = rows(printed)
    per_rank = np.stack([report.area, report.rows_sent, report.rows_received], axis=1)
    expected = {str(rank): numbers for rank, numbers in enumerate(per_rank)}
    expected |= {
        "smallest": per_rank.min(axis=0),
        "mean": per_rank.mean(axis=0),
        "largest": per_rank.max(axis=0),
    }
    assert table.pop("rank")[:3] == ["area", "/ mean", "rows sent"]
    for name in table:
        area, sent, received = expected[name]
        assert table[name] == [
            f"{area:,.0f}",
            f"{area / report.area.mean():.3f}",
            f"{sent:,.0f}",
            f"{received:,.0f}",
            format_bytes(sent * cost.row_bytes),
            format_bytes(received * cost.row_bytes),
        ]
    assert {"smallest", "mean", "largest"} < set(table)
    share = report.rows_received.mean() / plan.shard_length
    assert f"{report.imbalance:.4f} (largest / mean area)" in printed
    work = f"{report.work_imbalance:.4f}, backward {report.backward_work_imbalance:.4f}"
    assert f"of predicted attention {work}" in printed
    assert f"{share:.4f} of a rank's own rows" in printed
    assert re.search(rf"^stages +{report.num_stages} *$", printed, flags=re.MULTILINE)
    assert f"{report.network_rows_received.mean() / plan.shard_length:.4f} from other hosts" in printed
    assert f"backward stages  {report.num_backward_stages}" in printed
    assert f"forward pass     {report.predicted_seconds * 1e3:.3f} ms predicted" in printed
    assert f"backward pass    {report.predicted_backward_seconds * 1e3:.3f} ms predicted" in printed


MASKS = {
    "causal": (["--tokens", "700"], masks.causal(700)),
    "full": (["--tokens", "700"], masks.full(700)),
    "sliding-window": (["--tokens", "700", "--left", "90"], masks.sliding_window(700, 90)),
    "sliding-window right": (
        ["--tokens", "700", "--left", "-1", "--right", "7"],
        masks.sliding_window(700, -1, 7),
    ),
    "video": (["--num-chunks", "7", "--tokens-per-chunk", "100"], masks.video(7, 100)),
    "video range": (
        ["--num-chunks", "7", "--tokens-per-chunk", "100", "--kv-range", "2"],
        masks.video(7, 100, 2),
    ),
    "shared-prefix": (
        ["--prefix", "200", "--lengths", "FILE"],
        masks.shared_prefix(200, [300, 20, 100, 0, 92]),
    ),
    "documents": (["--lengths", "FILE"], masks.documents([300, 20, 100, 0, 92])),
    "documents drawn": (
        ["--lengths", HISTOGRAM, "--tokens", "5000"],
        masks.documents(document_lengths(5000)),
    ),
}


@pytest.mark.parametrize("case", MASKS)
def test_plan_prints_the_report(case: str, lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, mask = MASKS[case]
    options = [lengths if option == "FILE" else option for option in options]
    printed = run(capsys, "plan", "--mask", case.split()[0], *options, "--cp", "4", "--num-stages", "2")
    plan = plan_context(mask, 4, num_stages=2)
    assert set(rows(printed)) >= {"0", "1", "2", "3"}
    check_printed(printed, plan)


def test_options_of_the_plan_and_of_the_attention(capsys: pytest.CaptureFixture[str]) -> None:
    attention = ["--heads", "6", "--kv-heads", "2", "--head-dim", "48", "--bytes-per-element", "4"]
    attention += ["--ranks-per-host", "3"]
    printed = run(capsys, *CAUSAL, "--chunk-size", "16", "--num-stages", "3", *attention)
    cost = CostModel(num_heads=6, num_kv_heads=2, head_dim=48, bytes_per_element=4, ranks_per_host=3)
    assert cost.row_bytes == 2 * 2 * 48 * 4
    check_printed(printed, plan_context(masks.causal(512), 4, chunk_size=16, num_stages=3, cost=cost), cost)


def test_speeds_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = CostModel(tflops=123.4, link_gb_per_second=5, num_heads=16, num_kv_heads=2, ranks_per_host=2)
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
        ('{"num_kv_heads": 7}', "CostModel.num_heads=64 is no multiple of num_kv_heads=7"),
    ],
)
def test_bad_speeds_of_a_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cost.json").write_text(text)
    assert_refused([*CAUSAL, "--cost", str(tmp_path / "cost.json")], message, capsys)


def test_number_of_stages_is_that_of_auto(capsys: pytest.CaptureFixture[str]) -> None:
    check_printed(run(capsys, *CAUSAL), plan_context(masks.causal(512), 4))


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
    """A document of one token per rank, with pictures."""
    path = tmp_path / "ones.csv"
    path.write_text("1,1,1,1")
    out = str(tmp_path / "pictures")
    printed = run(capsys, "plan", "--mask", "documents", "--lengths", str(path), "--cp", "4", "--out", out)
    assert rows(printed)["largest"] == ["1", "1.000", "0", "0", "0 B", "0 B"]


@pytest.mark.parametrize(("cp", "stages"), [(1, 1), (4, 3), (70, 2)])
def test_pictures_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cp: int, stages: int
) -> None:
    out = tmp_path / "new" / "folder"
    options = ["--tokens", "9000", "--left", "2000", "--cp", str(cp), "--num-stages", str(stages)]
    printed = run(capsys, "plan", "--mask", "sliding-window", *options, "--out", str(out))
    for name in ("mask", "ranks", "timeline"):
        assert str(out / f"{name}.png") in printed
        image = matplotlib.image.imread(out / f"{name}.png")
        assert image.shape[:2] == (810, 1440)
        assert image[..., :3].std() > 0.05


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_schedule_waits_for_keys_and_ends_with_the_prediction(stages: int) -> None:
    plan, cost = plan_context(masks.causal(4096), 4, num_stages=stages), CostModel()
    schedule = schedule_stages(plan.forward_stages, cost, cost.forward)
    transfers, calls = schedule.transfers, schedule.stages
    assert schedule.seconds == plan.report(cost).predicted_seconds == calls[..., 1].max()
    assert (transfers[0, 0], transfers.shape) == (0, (max(1, stages - 1), 2))
    np.testing.assert_array_equal(transfers[1:, 0], transfers[:-1, 1])
    assert (np.diff(calls.reshape(4, -1)) >= 0).all()
    waiting = calls[:, 1:] if stages > 1 else calls
    assert (waiting[..., 0] >= transfers[:, 1]).all()
    if stages > 1:
        assert (calls[:, 0, 0] == 0).all()


REFUSED = [
    (["--tokens", "0"], "argument --tokens: '0' is not an integer from 1 to"),
    (["--tokens", "many"], "argument --tokens: 'many' is not an integer from 1 to"),
    (["--tokens", str(2**31)], f"'{2**31}' is not an integer"),
    (["--cp", "0"], "argument --cp: '0'"),
    (["--cp", "2.5"], "argument --cp: '2.5'"),
    (["--chunk-size", "-1"], "argument --chunk-size: '-1'"),
    (["--chunk-size", "129"], "= 128, but it is 129"),
    (["--num-stages", "0"], "argument --num-stages: '0'"),
    (["--num-stages", "few"], "argument --num-stages: 'few'"),
    (["--heads", "0"], "argument --heads: '0'"),
    (["--kv-heads", "7"], "--heads 64 is no multiple of --kv-heads 7"),
    (["--head-dim", "x"], "argument --head-dim: 'x'"),
    (["--bytes-per-element", "0"], "argument --bytes-per-element: '0'"),
    (["--left", "3"], "--left 3 is not for --mask causal"),
    (["--mask", "dense"], "argument --mask: invalid choice: 'dense'"),
    (["--mask", "sliding-window"], "--mask sliding-window needs --left"),
    (["--mask", "sliding-window", "--left", "-2"], "argument --left: '-2'"),
    (["--mask", "sliding-window", "--left", "1", "--right", "-2"], "argument --right: '-2'"),
    (["--mask", "video"], "--mask video needs --num-chunks"),
    (["--mask", "documents"], "--mask documents needs --lengths"),
    (["--mask", "shared-prefix", "--lengths", HISTOGRAM], "--mask shared-prefix needs --prefix"),
    (["--mask", "documents", "--lengths", "/no/such/file"], "/no/such/file"),
    (["--cost", "/no/such/file"], "/no/such/file"),
    (["--out", HISTOGRAM], HISTOGRAM),
    (["--tok", "3"], "unrecognized arguments: --tok 3"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_options_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused([*CAUSAL, *options], message, capsys)


FILES = {
    "": "has no lengths",
    "12\nx3\n": "line 2: 'x3' is not an integer",
    "12\n4, -5\n": "line 2: '-5' is not an integer",
    "0\n0": "has 0 tokens",
    "range,number\n": "has no lengths",
    'range,number\n"[0, 10]",5\n': "is a histogram: give --tokens",
    "range,number\n7,5\n": "a row of the histogram is",
    'range,number\n"[0, 10]",x\n': "a row of the histogram is",
    'range,count\n"[0, 10]",5\n': "a row of the histogram is",
    f"{2**30}\n{2**30}": "the sum of lengths must be between",
}


@pytest.mark.parametrize("text", FILES)
def test_bad_files_of_lengths_are_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    options = ["plan", "--mask", "documents", "--lengths", str(path), "--cp", "2"]
    assert_refused(options, FILES[text], capsys)


def test_lengths_that_cannot_be_drawn_from_or_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.csv"
    options = ["plan", "--mask", "documents", "--lengths", str(path), "--cp", "2", "--tokens", "9"]
    path.write_text("0")
    assert_refused(options, "has no length above 0", capsys)
    path.write_bytes(b"\xff\xfe12")
    assert_refused(options, f"--lengths {path} is not text", capsys)


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused([], "COMMAND", capsys)
    assert_refused(["diagnose"], "'diagnose'", capsys)
    assert_refused(["plan", "--mask", "causal", "--tokens", "9"], "--cp", capsys)


def assert_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_doctor_without_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(_doctor, "_devices", fail)
    assert main(["doctor"]) == 1
    assert "Unable to initialize backend 'tpu'" in capsys.readouterr().out


def test_doctor_without_extras(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = _doctor._version
    monkeypatch.setattr(_doctor, "_version", lambda name: None if name == "rich" else known(name))
    assert re.search(r"rich +not installed: pip install jaxmagi\[cli\]", run(capsys, "doctor"))


class Gpu:
    """What the checks ask of a device."""

    def __init__(self, kind: str, capability: str) -> None:
        self.device_kind, self.compute_capability = kind, capability


@pytest.mark.parametrize(
    ("gpu", "built", "reason"),
    [
        (Gpu("NVIDIA H200", "9.0"), True, None),
        (Gpu("NVIDIA H200", "9.0"), False, "jaxmagi was built without CUDA"),
        (Gpu("NVIDIA A100", "8.0"), True, "NVIDIA A100 has compute capability 8.0"),
    ],
)
def test_doctor_judges_gpus(
    gpu: Gpu,
    built: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On devices that are not there, as the checks of the lowering see them."""
    handlers = {target: {} for target in (_cuda.CAST, _cuda.REDUCE, _cuda.DONE)}
    module = types.SimpleNamespace(
        registrations=lambda: handlers, set_memory_limit=None, __file__="_cuda.abi3.so"
    )
    monkeypatch.setitem(
        _native._EXTENSIONS,
        "cuda",
        module if built else None,  # pyright: ignore[reportArgumentType]
    )
    monkeypatch.setattr(_hopper, "local_gpus", lambda: [gpu])
    monkeypatch.setattr(_doctor, "_devices", lambda: {"cpu": [], "cuda": [gpu, gpu]})
    printed = run(capsys, "doctor")
    assert f"2 x {gpu.device_kind}, compute capability {gpu.compute_capability}" in printed
    for name, limits in (("ffi", r"bfloat16"), ("native", "between GPUs of one host")):
        line = rf"runs \({limits}" if reason is None else f"cannot run: {reason}"
        assert re.search(rf'"{name}" on cuda +{line}', printed)
    assert re.search(rf'"nccl" on cuda +{f"cannot run: {reason}" if reason else "runs"}', printed)
    assert len(re.findall(r'"xla" on cuda +runs\n', printed)) == 2


def test_doctor_as_a_program() -> None:
    command = [sys.executable, "-m", "jaxmagi", "doctor"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for package in ("jaxmagi", "jax", "jaxlib", "python"):
        assert re.search(rf"^  {package} +\d+\.\d+", result.stdout, flags=re.MULTILINE)
    assert re.search(r"jaxmagi._cpu +loaded, 2 handlers", result.stdout)
    assert re.search(r'"ffi" on cpu +runs\n', result.stdout)
