"""The collectives over one axis of a mesh of two, over devices in any order, on GPUs."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from jaxmagi import GroupCastSpec

from .groups import Group, assert_close, assert_equal, on_groups, place, require_devices, require_one_host
from .harness import AXIS, normal
from .routes import INPUT_ROWS, Transfer, random_transfer

PAIRS = [Group("native", 2), Group("nccl", 2), Group(None, 2, ranks_per_host=1)]
ORDER = [2, 0, 3, 1]
"""Devices of a mesh: neighbours along an axis never have adjacent numbers."""


def make_mesh(group: Group, kind: AxisType, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh for a group along its axes; in this order no neighbours share a host where there are several."""
    require_devices(4)
    require_one_host(group, ranks_per_host=1)
    devices = np.array(jax.devices()[:4])[ORDER].reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(shape))


def cast_rows(transfer: Transfer, x: np.ndarray) -> np.ndarray:
    """Over the second axis, for each index of the first."""
    return np.stack([transfer.cast(one) for one in x])


def cast_columns(transfer: Transfer, x: np.ndarray) -> np.ndarray:
    return cast_rows(transfer, x.swapaxes(0, 1)).swapaxes(0, 1)


def sum_rows(transfer: Transfer, y: np.ndarray) -> np.ndarray:
    return np.stack([transfer.reduce_sum(one) for one in y])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@on_groups(*PAIRS, in_mesh=True)
def test_both_axes_of_a_square(group: Group, kind: AxisType, rng: np.random.Generator) -> None:
    """Along the rows, along the columns, and along the rows with the columns left to the compiler."""
    mesh = make_mesh(group, kind, (2, 2), ("data", AXIS))
    along_rows, along_columns = random_transfer(rng, 2), random_transfer(rng, 2)
    x = normal(rng, 2, 2, INPUT_ROWS, 3)

    def full(x: jax.Array, row_spec: GroupCastSpec, column_spec: GroupCastSpec) -> Any:
        cast = group.cast(x[0, 0], row_spec)
        results = cast, group.reduce(cast, row_spec), group.cast(x[0, 0], column_spec, "data")
        return jax.tree.map(lambda leaf: leaf[None, None], results)

    def partial(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        return jax.vmap(lambda one: group.cast(one, spec))(x[:, 0])[:, None]

    @jax.jit
    def run(x: jax.Array, row_spec: GroupCastSpec, column_spec: GroupCastSpec) -> Any:
        both, one = P("data", AXIS), P(None, AXIS)
        mapped = jax.shard_map(full, in_specs=(both, P(), P()), out_specs=both)
        over_one = jax.shard_map(partial, in_specs=(one, P()), out_specs=one, axis_names={AXIS})
        return *mapped(x, row_spec, column_spec), over_one(x, row_spec)

    with jax.set_mesh(mesh):
        placed = place(x, mesh, P("data", AXIS))
        rows, back, columns, partly = run(placed, *place((along_rows.spec, along_columns.spec), mesh, P()))
    wanted = cast_rows(along_rows, x)
    assert_equal((rows, columns, partly), (wanted, cast_columns(along_columns, x), wanted))
    assert_close(back, sum_rows(along_rows, wanted), 1e-6)


@on_groups(Group("native", 4), Group("nccl", 4), Group(None, 4, ranks_per_host=2))
def test_devices_in_another_order(group: Group, rng: np.random.Generator) -> None:
    """Inside of jit and without it."""
    mesh = make_mesh(group, AxisType.Explicit, (4,), (AXIS,))
    transfer = random_transfer(rng, 4)
    x = normal(rng, 4, INPUT_ROWS, 3)

    def local(x: jax.Array, spec: GroupCastSpec) -> jax.Array:
        return group.cast(x[0], spec)[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS))
    operands = place(x, mesh, P(AXIS)), place(transfer.spec, mesh, P())
    for run in (jax.jit(mapped), mapped):
        assert_equal(run(*operands), transfer.cast(x))
