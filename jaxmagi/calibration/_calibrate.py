"""Measures a `CostModel` of the devices at hand.

Programs with times that the model predicts are timed, and the model is solved for its speeds. They are
attention under masks with different shares of partial tiles, an addition in memory, and transfers of few and
of many bytes.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._checks import require_type
from .._dtypes import accumulator_dtype
from ..attention import DTYPES
from ..planning import CostModel
from ..planning._cost import Pass
from ..planning._tiles import count_tiles
from . import _probes, _processes
from ._chain import mesh_of
from ._probes import Direction, Probe, Sizes

_DIGITS = 4  # more digits than a second measurement would repeat
_FLOAT_BYTES = 4
_MIN_LENGTH_RATIO = 16  # smallest ratio of the bytes of a long transfer to those of a short one


class _Ranks(NamedTuple):
    """Holds the ranks that are measured, all at the same time."""

    mesh: Mesh
    axis_name: str  # mesh axis over which rows are transferred
    ranks_per_host: int  # number of consecutive ranks of the axis on each host
    given: bool  # whether the caller gave ranks_per_host

    def peers(self, same_host: bool) -> list[list[int]]:
        """Returns for each rank the other ranks of its host, or the ranks of other hosts."""
        ranks = range(self.mesh.shape[self.axis_name])
        hosts = [rank // self.ranks_per_host for rank in ranks]
        return [
            [peer for peer in ranks if peer != rank and (hosts[peer] == hosts[rank]) == same_host]
            for rank in ranks
        ]


def calibrate(
    mesh: Mesh | None = None,
    axis_name: str | None = None,
    *,
    num_heads: int = 64,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ranks_per_host: int | None = None,
) -> CostModel:
    """Measures the speeds of a `CostModel` on the devices at hand, in some seconds.

    It measures ``tflops``, ``backward_tflops``, ``partial_tile_cost`` (the mean of both passes, and 1 at
    least), ``memory_gb_per_second`` and ``latency_us`` (the largest of the fixed times of a forward call, a
    backward call and a transfer within a host); between several devices of a host ``link_gb_per_second``, and
    between hosts ``network_gb_per_second``, ``network_latency_us`` and ``ranks_per_host``. What cannot be
    measured keeps its default: links and networks with one device, networks with one host. Gradients are
    taken to return in float32 (float64 for float64); with a ``wire_dtype``, replace ``bytes_per_gradient``.

    Attention runs by the default implementation of `attention`, which is plain XLA where kernels do not fit
    (float32 on GPUs, for example). All devices work at the same time, as they do under a plan, and the
    slowest one counts. The devices should be idle otherwise. With several processes each of them has to call
    this function, and all get the same model. Planning needs no GPU and every host must plan with the same
    model, so keep the result: its ``repr`` is a Python expression, which ``python -m jaxmagi calibrate``
    prints.

    Args:
        mesh: the devices to measure, from all processes. None: all devices, on one axis.
        axis_name: the axis of the mesh over which context parallelism runs; None if it has one axis.
        num_heads: query heads of a rank.
        num_kv_heads: key heads of a rank.
        head_dim: dimension of a query, key and value head.
        dtype: of queries, keys and values.
        ranks_per_host: ranks of the axis with the same ``rank // ranks_per_host`` are taken to share a host,
            as in `group_cast`. None: ranks of processes on the same host.

    Returns:
        The model, with the measured numbers in the units of `CostModel`, rounded to four digits.

    Raises:
        ValueError: `CostModel` rejects the numbers of heads, ``head_dim`` or ``ranks_per_host``, `attention`
            does not support ``dtype``, ``dtype`` needs 64-bit types to be enabled, the axis is unknown, the
            mesh has no device of some process, or ranks of one host are not consecutive.
        ImportError: the compiled extension is missing.
        RuntimeError: no speed explains the measured times, because the machine is busy, or the compiler has
            moved a transfer out of the loop that is timed.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, but it is {dtype.name}.")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {dtype.name} needs jax.config.update('jax_enable_x64', True).")
    start = CostModel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bytes_per_element=dtype.itemsize,
        bytes_per_gradient=accumulator_dtype(dtype).itemsize,
        ranks_per_host=CostModel.ranks_per_host if ranks_per_host is None else ranks_per_host,
    )
    ranks = _ranks(mesh, axis_name, ranks_per_host)
    sizes = _probes.ON_GPUS if ranks.mesh.devices.flat[0].platform == "gpu" else _probes.ELSEWHERE
    exchanges = _exchanges(start, sizes, ranks)
    with jax.set_mesh(ranks.mesh):
        seconds = _probes.take_times(
            _compute_probes(start, sizes, ranks, dtype) | _transfer_probes(start, exchanges, ranks, dtype)
        )
    numbers = _solve(start, sizes, exchanges, seconds)
    rounded = {name: float(f"{number:.{_DIGITS}g}") for name, number in numbers.items()}
    if any(ranks.peers(same_host=False)):
        start = dataclasses.replace(start, ranks_per_host=ranks.ranks_per_host)
    return dataclasses.replace(start, **rounded)


def _ranks(mesh: Mesh | None, axis_name: str | None, ranks_per_host: int | None) -> _Ranks:
    """Returns the ranks to measure; raises ValueError if the mesh does not fit."""
    if mesh is None:
        mesh = mesh_of(len(jax.devices()))
    require_type(mesh, Mesh, "mesh")
    if axis_name is None and len(mesh.axis_names) == 1:
        axis_name = mesh.axis_names[0]
    if axis_name is None or axis_name not in mesh.axis_names:
        raise ValueError(f"axis_name must be one of {mesh.axis_names}, but it is {axis_name!r}.")
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) < jax.process_count():
        raise ValueError(
            f"the mesh must have devices of all {jax.process_count()} processes, but it has those of "
            f"{sorted(processes)}."
        )
    # Axes of Auto type let the timed programs leave sharding to shard_map.
    auto_mesh = Mesh(mesh.devices, mesh.axis_names)
    on_a_host = ranks_per_host or _consecutive_on_a_host(mesh, axis_name)
    return _Ranks(auto_mesh, axis_name, on_a_host, ranks_per_host is not None)


def _consecutive_on_a_host(mesh: Mesh, axis_name: str) -> int:
    """Returns how many consecutive ranks of the axis share a host."""
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    ranks = np.moveaxis(_processes.hosts()[processes], mesh.axis_names.index(axis_name), 0)
    hosts = ranks.reshape(len(ranks), -1)
    count = int((hosts[:, 0] == hosts[0, 0]).sum())
    expected = np.arange(len(hosts)) // count
    for group in hosts.T.tolist():
        in_order_of_ranks = list(dict.fromkeys(group))
        found = [in_order_of_ranks.index(host) for host in group]
        if not np.array_equal(found, expected):
            raise ValueError(
                f"ranks of one host must have consecutive numbers on axis {axis_name!r}, as many on each "
                f"host, but the hosts are {found}: reorder the devices of the mesh, or give ranks_per_host."
            )
    return count


class _Exchange(NamedTuple):
    """Describes rows that all ranks of a host, or ranks of different hosts, send to one another."""

    same_host: bool
    is_short: bool
    rows: int  # number of rows that a rank sends to each peer
    received_bytes: int  # number of bytes that a rank with the most peers receives


def _exchanges(start: CostModel, sizes: Sizes, ranks: _Ranks) -> dict[str, _Exchange]:
    """Returns short and long exchanges within a host and between hosts, where there are peers."""
    exchanges = {}
    for name, same_host in (("link", True), ("network", False)):
        peers = max(map(len, ranks.peers(same_host)))
        row_bytes = peers * start.row_bytes
        if peers:
            few = max(1, sizes.few_bytes // row_bytes)
            many = max(_MIN_LENGTH_RATIO * few, sizes.many_bytes // row_bytes)
            exchanges[f"{name} short"] = _Exchange(same_host, True, few, few * row_bytes)
            exchanges[f"{name} long"] = _Exchange(same_host, False, many, many * row_bytes)
    return exchanges


def _compute_probes(start: CostModel, sizes: Sizes, ranks: _Ranks, dtype: jnp.dtype) -> dict[str, Probe]:
    """Returns the probes that run on each device alone."""
    probes: dict[str, Probe] = {"memory": functools.partial(_probes.addition_probe, sizes.floats, ranks.mesh)}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        for name, mask in sizes.masks().items():
            probes[f"{direction} {name}"] = functools.partial(
                _probes.attention_probe, direction, mask, start, dtype, ranks.mesh
            )
    return probes


def _transfer_probes(
    start: CostModel, exchanges: Mapping[str, _Exchange], ranks: _Ranks, dtype: jnp.dtype
) -> dict[str, Probe]:
    """Returns the probes that transfer rows between devices."""
    return {
        name: functools.partial(
            _probes.transfer_probe,
            _probes.exchange(ranks.peers(exchange.same_host), exchange.rows),
            start,
            dtype,
            ranks.mesh,
            ranks.axis_name,
            ranks.ranks_per_host if ranks.given else None,
            exchange.is_short,
        )
        for name, exchange in exchanges.items()
    }


def _solve(
    start: CostModel, sizes: Sizes, exchanges: Mapping[str, _Exchange], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Returns the attributes of the `CostModel` that predicts these times."""
    forward = _solve_pass("forward", start.forward, sizes, seconds)
    backward = _solve_pass("backward", start.backward, sizes, seconds)
    added_bytes = 3 * _FLOAT_BYTES * sizes.floats
    numbers = {
        "tflops": start.tflops * start.forward.cell_seconds / forward.cell_seconds,
        "backward_tflops": start.backward_tflops * start.backward.cell_seconds / backward.cell_seconds,
        "partial_tile_cost": max(1.0, (forward.partial_tile_cost + backward.partial_tile_cost) / 2),
        "memory_gb_per_second": added_bytes * 1e-9 / _positive(seconds["memory"], "memory", seconds),
    }
    fixed = [forward.fixed_seconds, backward.fixed_seconds]
    if "link long" in exchanges:
        bytes_per_second, latency = _solve_link("link", exchanges, seconds)
        numbers["link_gb_per_second"] = bytes_per_second * 1e-9
        fixed.append(latency)
    if "network long" in exchanges:
        bytes_per_second, latency = _solve_link("network", exchanges, seconds)
        numbers["network_gb_per_second"] = bytes_per_second * 1e-9
        numbers["network_latency_us"] = latency * 1e6
    return numbers | {"latency_us": max(fixed) * 1e6}


class _PassSpeed(NamedTuple):
    """Holds the speeds of the forward or of the backward pass."""

    cell_seconds: float
    partial_tile_cost: float
    fixed_seconds: float


def _solve_pass(name: Direction, direction: Pass, sizes: Sizes, seconds: Mapping[str, float]) -> _PassSpeed:
    """Solves for the speeds of a pass, from the times of as many masks as there are unknowns."""
    times = [seconds[f"{name} {mask}"] for mask in sizes.masks()]
    bands = [np.asarray(mask.bands) for mask in sizes.masks().values()]
    tiles = count_tiles(np.concatenate(bands), np.array([len(part) for part in bands]), direction)
    full, partial, fixed = np.linalg.solve(np.column_stack([tiles, np.ones(len(times))]), times)
    cells = direction.tile.rows * direction.tile.keys
    cost = _positive(partial, name, seconds) / _positive(full, name, seconds)
    return _PassSpeed(full / cells, cost, max(0.0, fixed))


def _solve_link(
    name: str, exchanges: Mapping[str, _Exchange], seconds: Mapping[str, float]
) -> tuple[float, float]:
    """Returns bytes per second, and the seconds that a transfer of no bytes takes."""
    short, long = (f"{name} {length}" for length in ("short", "long"))
    more_bytes = exchanges[long].received_bytes - exchanges[short].received_bytes
    per_byte = _positive(seconds[long] - seconds[short], name, seconds) / more_bytes
    return 1 / per_byte, max(0.0, seconds[short] - exchanges[short].received_bytes * per_byte)


def _positive(value: float, name: str, seconds: Mapping[str, float]) -> float:
    """Returns a positive value; raises RuntimeError for another, as the devices must have been busy."""
    if value > 0:
        return value
    taken = ", ".join(f"{each}: {1e6 * time:.4g} us" for each, time in seconds.items() if name in each)
    raise RuntimeError(
        f"calibrate cannot tell a speed from the times that it has measured ({taken}). "
        "The devices or their hosts are busy with other work: try again when they are not."
    )
