"""Groups of ranks that the same checks run on: of any implementation, in one process or in several.

Checks put what they give to a program on its devices by `place`, and compare what they get by `local_parts`:
in a group of several processes none of them sees whole arrays.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from jaxmagi import CollectiveOptions, GroupCastSpec, group_cast, group_reduce

from .. import hosts
from ..launcher import can_share
from .harness import AXIS

type Implementation = Literal["native", "nccl", "xla"] | None


@dataclass(frozen=True)
class Group:
    """Ranks, and how they exchange rows."""

    implementation: Implementation
    size: int
    num_sms: int = 16
    ranks_per_host: int | None = None

    def __str__(self) -> str:
        name = f"{self.implementation or 'default'}-{self.size}"
        if self.num_sms != 16:
            name += f"-{self.num_sms}sms"
        return name if self.ranks_per_host is None else f"{name}-{self.ranks_per_host}_per_host"

    @property
    def options(self) -> CollectiveOptions:
        """How the collectives run."""
        return CollectiveOptions(
            implementation=self.implementation, num_sms=self.num_sms, ranks_per_host=self.ranks_per_host
        )

    def cast(self, x: Any, spec: GroupCastSpec, axis_name: str = AXIS) -> Any:
        """`group_cast` by this implementation, inside of shard_map."""
        return group_cast(x, spec, axis_name=axis_name, options=self.options)

    def reduce(self, x: Any, spec: GroupCastSpec, axis_name: str = AXIS, **arguments: Any) -> Any:
        """`group_reduce` by this implementation, inside of shard_map."""
        return group_reduce(x, spec, axis_name=axis_name, options=self.options, **arguments)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """One axis, over the first devices."""
        return jax.make_mesh(
            (self.size,),
            (AXIS,),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=jax.devices()[: self.size],
        )

    def program(self, function: Callable[..., Any], in_specs: Any) -> Any:
        """A function of one rank, as a compiled one of the group, whose results lead with the ranks."""
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=P(AXIS)))

    def shard(self, tree: Any) -> Any:
        """Arrays of the host that lead with the ranks, to the devices of these."""
        return place(tree, self.mesh, P(AXIS))

    def replicate(self, tree: Any) -> Any:
        """Arrays of the host, to all devices of the group."""
        return place(tree, self.mesh, P())


def place(tree: Any, mesh: Mesh, spec: P) -> Any:
    """Arrays of the host, the same on all processes, on the devices of a mesh."""
    sharding = jax.NamedSharding(mesh, spec)

    def put(x: Any) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def require_devices(count: int) -> None:
    """Skips the test where there are fewer; and in several processes where not all would take part."""
    there = len(jax.devices())
    if count > there or (count < there and jax.process_count() > 1):
        pytest.skip(f"needs {count} devices, and there are {there}")


def require_one_host(group: Group, ranks_per_host: int | None = None) -> None:
    """Skips the test where ranks that the group takes to share a host do not.

    By default a host has consecutive ranks of the group, as many as `jax.devices` has of each host.
    """
    if hosts.count() == 1:
        return
    per_host = ranks_per_host or jax.device_count() // hosts.count()
    together = group.size if group.implementation == "native" else group.ranks_per_host or 1
    if per_host % together:
        pytest.skip(f"needs {together} ranks on a host, and each of {hosts.count()} has {per_host}")


def require_hosts(processes: int, count: int) -> None:
    """Skips the test where processes cannot be on so many hosts, or have too few GPUs."""
    if reason := hosts.why_not():
        pytest.skip(f"needs {count} hosts: {reason}")
    require_processes(processes)


def require_processes(count: int, devices_each: int = 1) -> None:
    """Skips the test where there are not enough GPUs for them, and they may not share these."""
    there = len(jax.devices())
    if count * devices_each > there and not (can_share() and devices_each <= there):
        pytest.skip(f"needs {count * devices_each} devices, and there are {there}")


def local_parts(got: jax.Array, want: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The parts of an array on devices of this process, with the same parts of the expected one."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    for shard in got.addressable_shards:
        yield np.asarray(shard.data), want[shard.index]


def assert_equal(got: Any, want: Any) -> None:
    """Compares all numbers of two pytrees, the second one of host arrays."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for mine, expected in local_parts(x, y):
            np.testing.assert_array_equal(mine, expected)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Compares like `assert_equal`, up to an absolute and relative tolerance."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for mine, expected in local_parts(x, y):
            wide = np.promote_types(mine.dtype, np.float32) if mine.dtype.kind == "f" else np.float32
            np.testing.assert_allclose(
                mine.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance
            )


def assert_same_bits(first: Any, second: Any) -> None:
    """Two pytrees of results."""
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        for mine, again in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert np.asarray(mine.data).tobytes() == np.asarray(again.data).tobytes()


def on_groups(*groups: Group, in_mesh: bool = False) -> pytest.MarkDecorator:
    """Runs a test on these groups of GPUs, and on three CPU devices in the ordinary suite.

    With ``in_mesh`` the groups are of a larger mesh, and the test has to require its devices.
    """
    on_gpus = [pytest.param(group, id=str(group), marks=pytest.mark.gpu) for group in groups]
    on_cpu = Group("xla", 3)
    return pytest.mark.parametrize(
        "group", [pytest.param(on_cpu, id=f"cpu-{on_cpu}"), *on_gpus], indirect=not in_mesh
    )


KINDS: tuple[Implementation, ...] = ("native", "nccl", None)
"""Implementations that there are on GPUs alone."""
SEVERAL = [Group(kind, size) for kind in KINDS[:2] for size in (2, 4)]
EVERY = [Group(kind, size) for kind in KINDS for size in (1, 2, 4)]
