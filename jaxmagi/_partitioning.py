"""Lets XLA's partitioner split an operation over mesh axes, where it would otherwise gather its operands.

A custom call is opaque to the partitioner. With `jax.experimental.custom_partitioning` it propagates
shardings through the call by a rule, and then asks a callback how to split it and what each device runs.

A sharding is treated here as an array of device numbers, not by the names of mesh axes: a part of an axis has
no name, and inside a ``shard_map`` over some of the axes the partitioner numbers devices within each group
of the other axes, in an order that no mesh has to have. No other module depends on JAX's internals for
partitioning.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import get_axis_env
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.sharding_impls import GSPMDSharding, ShardingContext, SPMDAxisContext
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir

from . import _native

DEVICES = "devices"
"""Names a mesh axis of all devices: outside of shard_map a `Partition.function` may communicate over it."""

_NO_MESH = jax.sharding.AbstractMesh((), ())


class Tiles(NamedTuple):
    """Says which devices hold which tile of an array.

    Attributes:
        devices: int64 [tiles of dimension 0, ..., tiles of the last dimension, copies], numbers of devices.
            For an array that every device has as a whole there may be no numbers: [1, ..., 1, 0].
    """

    devices: np.ndarray

    @property
    def counts(self) -> tuple[int, ...]:
        """Returns how many tiles each dimension is cut into."""
        return self.devices.shape[:-1]

    @property
    def total(self) -> int:
        """Returns how many tiles there are."""
        return math.prod(self.counts)

    def keep(self, *dims: int) -> "Tiles":
        """Returns the tiles along these dimensions. Devices that differ in other dimensions share them."""
        rest = [i for i in range(self.devices.ndim) if i not in dims]
        shape = [self.counts[i] for i in dims]
        return Tiles(
            self.devices.transpose(*dims, *rest).reshape(*shape, self.devices.size // math.prod(shape))
        )

    def embed(self, rank: int, dims: Sequence[int]) -> "Tiles":
        """Returns the tiles of an array of ``rank`` dimensions that is cut along ``dims``, ascending."""
        shape = np.ones(rank, np.int64)
        shape[list(dims)] = self.counts
        return Tiles(self.devices.reshape(*shape, self.devices.shape[-1]))


class Tiled(NamedTuple):
    """Describes an operand or a result as the partitioner has it."""

    shape: tuple[int, ...]
    tiles: Tiles

    def even(self, dims: Sequence[int]) -> list[int]:
        """Returns those of some dimensions whose tiles are all of one size."""
        return [i for i in dims if self.shape[i] % self.tiles.counts[i] == 0]


class Partition(NamedTuple):
    """Says how an operation is split.

    Attributes:
        function: what each device runs, on its tiles of the operands.
        operands: the tiles that the function takes; the partitioner moves operands there.
        results: the tiles that the function returns.
    """

    function: Callable[..., Sequence[jax.Array]]
    operands: Sequence[Tiles]
    results: Sequence[Tiles]


class ShardingRule(NamedTuple):
    """Says how shardings propagate through an operation, in Shardy's notation.

    Attributes:
        text: the factors of all dimensions of operands and results, as in "t (k g) d, s k d -> t (k g) d".
        replicated: the factors that must not be sharded, in the order in which they first appear.
        sizes: the sizes of the factors that appear in compound ones alone.
    """

    text: str
    replicated: Sequence[str]
    sizes: dict[str, int]


def make_rule(
    operands: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    is_replicated: Callable[[str], bool],
    sizes: dict[str, int] | None = None,
) -> ShardingRule:
    """Returns the rule of arrays with these factors, each a name or several as in "(k g)".

    Args:
        operands: the factors of each operand's dimensions.
        results: the factors of each result's dimensions.
        is_replicated: whether a factor must not be sharded.
        sizes: the sizes of the factors that appear in compound ones alone.
    """
    text = " -> ".join(", ".join(map(" ".join, side)) for side in (operands, results))
    used = dict.fromkeys(factor for factors in (*operands, *results) for factor in factors)
    return ShardingRule(text, [*filter(is_replicated, used)], sizes or {})


type Choose = Callable[[Sequence[Tiled], Sequence[Tiled]], Partition]
"""Decides how an operation is split, from its operands and results as propagation has left them."""


def can_be_partitioned(primitive: Primitive) -> None:
    """Makes JAX tell the primitive's lowering rules for which devices they lower, as partitioning needs."""
    prim_requires_devices_during_lowering.add(primitive)


def is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether the partitioner will split the program over devices at this place."""
    context = ctx.module_context.axis_context
    if isinstance(context, ShardingContext):
        return context.num_devices > 1 and context.device_assignment is not None
    return is_within_shard_map(ctx) and math.prod(axis_sizes(ctx).values()) > 1


def is_within_shard_map(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether a shard_map surrounds this place."""
    return isinstance(ctx.module_context.axis_context, SPMDAxisContext)


def axis_sizes(ctx: mlir.LoweringRuleContext) -> dict[str, int]:
    """Returns the sizes of the mesh axes that the partitioner splits over: those that no shard_map maps.

    There are none where the program has devices but no mesh.
    """
    context: Any = ctx.module_context.axis_context
    if isinstance(context, SPMDAxisContext):
        return {name: size for name, size in context.mesh.shape.items() if name not in context.manual_axes}
    mesh = getattr(context, "abstract_mesh", None)
    return {} if mesh is None else dict(mesh.shape)


def axes_of_vmap() -> tuple[str, ...]:
    """Returns the mesh axes over which a surrounding ``jax.vmap(..., spmd_axis_name=...)`` spreads examples.

    A shard_map has to map over them too, or JAX cuts its operands to the wrong size (jax 0.12.0).
    """
    return tuple(get_axis_env().spmd_axis_names)


def axes_along(tiles: Tiles, dim: int, sizes: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which a dimension is cut, none where there is no mesh."""
    if not sizes:
        return ()
    places = np.unravel_index(tiles.devices, tuple(sizes.values()))
    return tuple(name for name, at in zip(sizes, places, strict=True) if (at != at.take([0], axis=dim)).any())


def lower_partitioned(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    *,
    counts: Sequence[int] = (),
    bind: Callable[..., Sequence[jax.Array]],
    rule: ShardingRule,
    choose: Choose,
    identity: object,
) -> Sequence[Any]:
    """Lowers an operation to a call that the partitioner splits.

    Args:
        ctx: the context that the lowering rule has got.
        operands: the values that it has got.
        counts: for each count the numbers 0 to count - 1, int32, follow the operands. The rule shards them,
            so that a device knows by its numbers which tiles it has.
        bind: binds the primitive to the operands alone. It tells the types of the results.
        rule: how shardings propagate through operands, numbers and results.
        choose: decides how the operation is split.
        identity: anything whose ``repr`` tells the operation from others with operands of the same types. JAX
            recognises a program that it has compiled before, also on disk, by its text, which contains
            neither the parameters nor the function of such a call. So a hash of this, and of the sources of
            jaxmagi, becomes an operand.
    """

    @custom_partitioning
    def operation(digest: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        del digest
        return tuple(bind(*operands[: len(operands) - len(counts)]))

    callbacks = _Callbacks(_mesh(ctx), choose)
    options = {"need_replication_factors": ("digest", *rule.replicated), **rule.sizes}
    operation.def_partition(
        callbacks.partition,
        infer_sharding_from_operands=callbacks.infer,
        sharding_rule=lambda *_: (f"digest, {rule.text}", options),
        decode_shardings=False,  # parts of axes cannot be
    )

    def call(*operands: jax.Array) -> Any:
        numbers = (jnp.arange(count, dtype=jnp.int32) for count in counts)
        return operation(_digest(identity), *operands, *numbers)

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


class _Callbacks(NamedTuple):
    """Answers what `custom_partitioning` asks while XLA partitions a program."""

    mesh: Any
    choose: Choose

    def partition(self, _: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the mesh and the function of each device, and the shardings of results and operands."""
        chosen = self._choose(operands, results)

        def function(digest: jax.Array, *shards: jax.Array) -> tuple[jax.Array, ...]:
            del digest
            with jax.sharding.use_abstract_mesh(_NO_MESH):  # the mesh of jax.set_mesh is not the device's
                return tuple(chosen.function(*shards))

        everywhere = Tiles(np.zeros((1, 0), np.int64))
        of_operands, of_results = (everywhere, *chosen.operands), chosen.results
        return self.mesh, function, (*map(_to_sharding, of_results),), (*map(_to_sharding, of_operands),)

    def infer(self, _: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the shardings of results, for the partitioner before Shardy."""
        return (*map(_to_sharding, self._choose(operands, results).results),)

    def _choose(self, operands: Sequence[Any], results: Sequence[Any]) -> Partition:
        return self.choose([*map(_describe, operands[1:])], [*map(_describe, results)])


def _mesh(ctx: mlir.LoweringRuleContext) -> Any:
    """Returns the mesh over which the function of a `Partition` may communicate."""
    context: Any = ctx.module_context.axis_context
    if is_within_shard_map(ctx):
        return context.mesh
    return jax.sharding.AbstractMesh((context.num_devices,), (DEVICES,))


def _digest(identity: object) -> np.ndarray:
    """Returns a hash of an operation and of the sources of jaxmagi, int32 [8]."""
    return np.frombuffer(hashlib.sha256(repr((identity, *_sources())).encode()).digest(), np.int32)


@functools.cache
def _sources() -> tuple[str | None, str]:
    """Returns hashes of what the kernels were built from, and of the package's Python files."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    python = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return _native.kernel_sources(), python


def _describe(x: Any) -> Tiled:
    """Describes what `custom_partitioning` gives: a shape and, where that is known, a sharding."""
    sharding = getattr(x, "sharding", None)
    hlo = None if sharding is None else sharding._to_xla_hlo_sharding(len(x.shape))
    if hlo is None or not hlo.is_tiled():
        return Tiled(x.shape, Tiles(np.zeros((*[1] * len(x.shape), 0), np.int64)))
    counts = hlo.tile_assignment_dimensions()[: len(x.shape)]
    return Tiled(x.shape, Tiles(np.reshape(hlo.tile_assignment_devices(), (*counts, -1))))


def _to_sharding(tiles: Tiles) -> GSPMDSharding:
    """Returns tiles as `custom_partitioning` takes them. It reads no devices but those in the tiles."""
    if tiles.total == 1:
        return GSPMDSharding(jax.devices(), xla_client.HloSharding.replicate())
    copies = [xla_client.OpSharding.Type.REPLICATED]
    hlo = xla_client.HloSharding.subgroup_with_device_ordering(np.ascontiguousarray(tiles.devices), copies)
    return GSPMDSharding(jax.devices(), hlo)
