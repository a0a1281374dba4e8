"""`calibrate` with predicted times, on CPUs, and with several processes."""

import dataclasses
import functools
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxmagi
from jaxmagi import CostModel, calibrate
from jaxmagi._cli import main
from jaxmagi._cli._cost import read_cost
from jaxmagi.calibration import _probes, _processes
from jaxmagi.calibration._probes import Probe
from jaxmagi.planning._tiles import count_tiles

from ..launcher import Launch

HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
TRUTH = CostModel(
    tflops=0.25, backward_tflops=0.125, partial_tile_cost=1.75, memory_gb_per_second=12.5,
    link_gb_per_second=0.5, network_gb_per_second=0.0625, latency_us=8.0, network_latency_us=20.0,
    ranks_per_host=3, **HEADS,
)  # fmt: skip
KNOWN_ON_ONE_DEVICE = ("tflops", "backward_tflops", "partial_tile_cost", "memory_gb_per_second", "latency_us")
KNOWN_ON_ONE_HOST = (*KNOWN_ON_ONE_DEVICE, "link_gb_per_second")
KNOWN_BETWEEN_HOSTS = (
    *KNOWN_ON_ONE_DEVICE, "network_gb_per_second", "network_latency_us", "ranks_per_host",
)  # fmt: skip


class Machine(NamedTuple):
    """Predicts times by cost models, instead of running anything."""

    forward: CostModel = TRUTH
    backward: CostModel = TRUTH
    links: CostModel = TRUTH

    def take_times(self, probes: Mapping[str, Probe]) -> dict[str, float]:
        """Predicts the times of probes from their arguments."""
        asked = {name: probe for name, probe in probes.items() if isinstance(probe, functools.partial)}
        assert asked.keys() == probes.keys()
        return {name: getattr(self, probe.func.__name__)(*probe.args) for name, probe in asked.items()}

    def attention_probe(self, direction: str, mask: jaxmagi.AttnMask, *_: Any) -> float:
        cost = getattr(self, direction)
        attention_pass = getattr(cost, direction)
        bands = np.asarray(mask.bands)
        tiles = count_tiles(bands, np.array(len(bands)), attention_pass)
        return float(cost.compute_seconds(tiles, attention_pass))

    def addition_probe(self, floats: int, *_: Any) -> float:
        return TRUTH.memory_seconds(3.0 * 4 * floats)  # of 4 bytes: two are read, one is written

    def transfer_probe(self, spec: jaxmagi.GroupCastSpec, *_: Any) -> float:
        """Predicts the time of the rank that receives most."""
        src, rows = np.asarray(spec.receives)[..., 0], np.asarray(spec.receives)[..., 3]
        dst = np.arange(len(src))[:, None]
        within = src // self.links.ranks_per_host == dst // self.links.ranks_per_host
        busiest = np.array([(rows * where).sum(axis=1).max() for where in (within & (src != dst), ~within)])
        return float(self.links.transfer_seconds(busiest, self.links.row_bytes))


def measure(monkeypatch: pytest.MonkeyPatch, machine: Machine = Machine(), **options: Any) -> CostModel:  # noqa: B008
    monkeypatch.setattr(_probes, "take_times", machine.take_times)
    return calibrate(**(HEADS | options))


def mesh_of(*shape: int, kind: AxisType = AxisType.Auto) -> Mesh:
    names = ("data", "context")[-len(shape) :]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def assert_known(found: CostModel, names: tuple[str, ...], truth: CostModel = TRUTH) -> None:
    """Checks that ``names`` have the values of the truth, and other attributes their defaults."""
    for name, value in vars(found).items():
        expected = getattr(truth if name in names else CostModel(**HEADS), name)
        assert value == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize(
    ("shape", "ranks_per_host", "names"),
    [
        ((1,), None, KNOWN_ON_ONE_DEVICE),
        ((8,), 8, KNOWN_ON_ONE_HOST),
        ((8,), 3, tuple(vars(TRUTH))),
        ((2, 4), 3, tuple(vars(TRUTH))),
        ((4,), 1, KNOWN_BETWEEN_HOSTS),
    ],
)
def test_known_speeds_are_found(
    shape: tuple[int, ...],
    ranks_per_host: int | None,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meshes have one device, one host, two hosts of which the last has fewer ranks, and four hosts."""
    truth = dataclasses.replace(TRUTH, ranks_per_host=ranks_per_host or 1)
    options = {"mesh": mesh_of(*shape), "axis_name": "context", "ranks_per_host": ranks_per_host}
    assert_known(measure(monkeypatch, Machine(links=truth), **options), names, truth)


def test_all_devices_are_measured_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(links=dataclasses.replace(TRUTH, ranks_per_host=len(jax.devices())))
    assert_known(measure(monkeypatch, machine), KNOWN_ON_ONE_HOST)


def test_rows_larger_than_a_short_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = dataclasses.replace(TRUTH, head_dim=2**18, ranks_per_host=2)
    found = measure(monkeypatch, Machine(truth, truth, truth), mesh=mesh_of(2), head_dim=2**18)
    assert found.link_gb_per_second == pytest.approx(truth.link_gb_per_second, rel=1e-3)


def test_numbers_that_a_model_has_for_several_things(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has the mean cost of a partial tile, and the largest of all fixed times."""
    machine = Machine(
        forward=dataclasses.replace(TRUTH, partial_tile_cost=1.25, latency_us=4.0),
        backward=dataclasses.replace(TRUTH, partial_tile_cost=2.25, latency_us=0.0),
        links=dataclasses.replace(TRUTH, latency_us=30.0),
    )
    found = measure(monkeypatch, machine, mesh=mesh_of(3))
    expected = dataclasses.replace(TRUTH, latency_us=30.0)
    assert_known(found, KNOWN_ON_ONE_HOST, expected)
    assert measure(monkeypatch, machine, mesh=mesh_of(1)).latency_us == pytest.approx(4.0)


def test_partial_tiles_are_never_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = dataclasses.replace(TRUTH, partial_tile_cost=0.5)
    assert measure(monkeypatch, Machine(cheap, cheap), mesh=mesh_of(1)).partial_tile_cost == 1.0


@pytest.mark.parametrize("name", ["memory", "forward full", "backward full", "link long"])
def test_times_without_a_speed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Machine(links=dataclasses.replace(TRUTH, ranks_per_host=2))
    monkeypatch.setattr(_probes, "take_times", lambda probes: truth.take_times(probes) | {name: -1e-6})
    with pytest.raises(RuntimeError, match=rf"cannot tell a speed .*{name}: -1 us.* try again"):
        calibrate(mesh_of(2), **HEADS)


def test_float64_is_measured_as_such(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, mesh=mesh_of(1), dtype=jnp.float64)
    assert (found.bytes_per_element, found.bytes_per_gradient) == (8, 8)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"axis_name": "batch"}, r"axis_name must be one of \('ranks',\), but it is 'batch'"),
    ({"mesh": (2, 4)}, r"one of \('data', 'context'\), but it is None"),
    ({"mesh": "mesh"}, "mesh must be a Mesh, but it is 'mesh'"),
    ({"num_heads": 5}, "num_heads=5 is no multiple of num_kv_heads=2"),
    ({"head_dim": 0}, "head_dim .* 0"),
    ({"ranks_per_host": 0}, "ranks_per_host .* 0"),
    ({"dtype": jnp.int32}, "dtype must be one of .*bfloat16.*, but it is int32"),
    ({"dtype": jnp.float64}, "float64 needs .*jax_enable_x64"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    if isinstance(options.get("mesh"), tuple):
        options = {"mesh": mesh_of(*options["mesh"])}
    with pytest.raises(ValueError, match=message):
        calibrate(**(HEADS | options))


LESS_WORK: dict[str, Any] = {
    "ELSEWHERE": _probes.ELSEWHERE._replace(many_bytes=2**20),
    "_MANY_TURNS": 16,
    "_REPEATS": 3,
}
"""Has probes between ranks end sooner; a long transfer still takes several times as long as a short one."""


def assert_measured(found: CostModel, names: tuple[str, ...]) -> None:
    """Checks that ``names`` are slower than their defaults, which are those of GPUs, and others defaults."""
    for name, default in vars(CostModel(**HEADS)).items():
        value = getattr(found, name)
        if name not in names:
            assert value == default, name
        elif name.endswith(("flops", "per_second")):
            assert 0 < value < default, name


def test_the_cpu() -> None:
    assert_measured(calibrate(mesh_of(1), **HEADS), KNOWN_ON_ONE_DEVICE)


def test_an_axis_of_a_mesh_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mesh, which is also in context, has Explicit axes; each rank counts as a host."""
    for name, value in LESS_WORK.items():
        monkeypatch.setattr(_probes, name, value)
    mesh = mesh_of(2, 2, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        found = calibrate(mesh, "context", **HEADS, ranks_per_host=1)
    assert_measured(found, KNOWN_BETWEEN_HOSTS)


def test_batches_are_long_enough() -> None:
    """Work is repeated to long batches, which count all of its passes."""
    made = []
    work = _probes._repeat(_probes.DeviceWork(lambda: made.append(0), lambda _: None, 5), 3)
    work.seconds(2)
    assert (len(made), work.passes) == (6, 15)


def check_processes() -> None:
    """Checks that two processes with two devices each get one model, on one host and as if on two.

    All probes run, but their times are predicted: what two processes measure on busy cores may be in any
    order.
    """
    index = jax.process_index()
    assert _processes.largest(np.array([index, -index, 0.5])).tolist() == [1.0, 0.0, 0.5]
    for name, value in LESS_WORK.items():
        setattr(_probes, name, value)
    truth = dataclasses.replace(TRUTH, ranks_per_host=4)
    fast = dataclasses.replace(truth, tflops=1.0, backward_tflops=0.5, link_gb_per_second=2.0, latency_us=4.0)
    own, take_times, time_on_device = (fast, truth)[index], _probes.take_times, _probes.time_on_device

    def predict_times(probes: Mapping[str, Probe]) -> dict[str, float]:
        """Takes the times of the probes as if their runs took what the process predicts."""
        predicted = Machine(own, own, own).take_times(probes)

        def time_predicted(*arguments: Any, **options: Any) -> dict[str, Any]:
            names = time_on_device(*arguments, **options)
            return {name: SimpleNamespace(median=predicted[name]) for name in names}

        _probes.time_on_device = time_predicted
        return take_times(probes)

    _probes.take_times = predict_times
    found = calibrate(**HEADS)
    assert_known(found, KNOWN_ON_ONE_HOST, truth)
    print(f"measured {found!r}")
    socket.gethostname = lambda: f"host {index}"
    machine = Machine(links=dataclasses.replace(TRUTH, ranks_per_host=2))
    _probes.take_times = machine.take_times
    assert_known(calibrate(**HEADS), tuple(vars(TRUTH)), machine.links)
    devices = jax.devices()
    with pytest.raises(ValueError, match=r"'ranks'.* the hosts are \[0, 1, 0, 1\]: .* give ranks_per_host"):
        calibrate(Mesh(np.array(devices)[[0, 2, 1, 3]], "ranks"), **HEADS)
    with pytest.raises(ValueError, match=r"all 2 processes, but it has those of \[0\]"):
        calibrate(Mesh(np.array(devices[:2]), "ranks"), **HEADS)


def test_processes_get_one_model(launch: Launch) -> None:
    logs = launch(check_processes, processes=2, devices_each=2, timeout=200)
    first, second = (re.findall(r"^measured (.*)$", log, flags=re.MULTILINE) for log in logs)
    assert first == second and len(first) == 1
    assert_measured(eval(first[0]), KNOWN_ON_ONE_HOST)


def test_command_prints_an_expression(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine = Machine(links=dataclasses.replace(TRUTH, ranks_per_host=len(jax.devices())))
    expected = measure(monkeypatch, machine, dtype=jnp.float32)
    heads = ["--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--dtype", "float32"]
    assert main(["calibrate", *heads, "--out", str(tmp_path / "cost.json")]) == 0
    out, err = capsys.readouterr()
    assert err == "" and eval(out) == expected
    assert read_cost(tmp_path / "cost.json") == expected
    with pytest.raises(SystemExit):
        main(["calibrate", "--kv-heads", "7"])
    assert "--heads 64 is no multiple of --kv-heads 7" in capsys.readouterr().err


def test_command_says_why_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Mapping[str, Probe]) -> dict[str, float]:
        raise RuntimeError("no speed")

    monkeypatch.setattr(_probes, "take_times", fail)
    assert main(["calibrate"]) == 1
    assert capsys.readouterr() == ("", "python -m jaxmagi calibrate: no speed\n")
