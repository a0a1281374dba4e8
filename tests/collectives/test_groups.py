"""The devices that a lowering takes for the ranks of a mesh axis have their places in the mesh."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from jaxmagi.collectives._groups import replica_groups

PERMUTED = np.array([5, 2, 7, 0, 1, 6, 3, 4])


def positions(mesh: Mesh, axis_name: str) -> np.ndarray:
    """The places of the devices along an axis in ``mesh.devices.flat``, [groups, size]."""
    numbers = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    return np.moveaxis(numbers, mesh.axis_names.index(axis_name), -1).reshape(-1, mesh.shape[axis_name])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("partial", [False, True], ids=["all_axes", "one_axis"])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("shape", [{"ranks": 8}, {"data": 2, "ranks": 4}, {"ranks": 4, "data": 2}], ids=str)
def test_groups(
    shape: dict[str, int],
    permuted: bool,
    partial: bool,
    kind: AxisType,
) -> None:
    found: list[np.ndarray] = []

    def rule(ctx: mlir.LoweringRuleContext, x: Any) -> list[Any]:
        found.append(replica_groups(ctx, "ranks"))
        return [x]

    probe = Primitive("groups_probe")
    probe.def_abstract_eval(lambda x: x)
    mlir.register_lowering(probe, rule)
    devices = np.array(jax.devices())[PERMUTED if permuted else np.arange(8)]
    mesh = Mesh(devices.reshape(*shape.values()), tuple(shape), axis_types=(kind,) * len(shape))
    expected = positions(mesh, "ranks")
    axes = {"ranks"} if partial else set(shape)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            probe.bind,
            in_specs=P("ranks"),
            out_specs=P("ranks"),
            axis_names=axes,
        )
        sharding = jax.NamedSharding(mesh, P("ranks"))
        jax.jit(mapped).lower(jax.ShapeDtypeStruct((8,), np.int32, sharding=sharding))
    (groups,) = found
    assert groups.dtype == np.int64
    np.testing.assert_array_equal(groups, expected)
