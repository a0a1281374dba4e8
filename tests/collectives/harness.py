"""Runs the collectives on CPU devices, compiled once per kind of call."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import GroupCastSpec, group_cast, group_reduce

AXIS = "context"
BY_RANK = P(AXIS)


@functools.cache
def make_mesh(cp_size: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """A mesh of one axis, on the first devices."""
    return jax.make_mesh((cp_size,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:cp_size])


def on_ranks(function: Any, cp_size: int, *, in_specs: Any = BY_RANK, **options: Any) -> Any:
    """A function of one rank, mapped over the ranks. Results lead with these, and operands by default."""
    return jax.shard_map(function, mesh=make_mesh(cp_size), in_specs=in_specs, out_specs=P(AXIS), **options)


@functools.cache
def cast_function(cp_size: int, *, spec_sharded: bool = False, check_vma: bool = True) -> Any:
    """Compiled: x [cp, rows, ...], spec → [cp, rows, ...]."""

    def local(x: Any, spec: GroupCastSpec) -> Any:
        x = jax.tree.map(lambda leaf: leaf[0], x)
        return jax.tree.map(lambda leaf: leaf[None], group_cast(x, spec, axis_name=AXIS))

    spec_layout = P(AXIS) if spec_sharded else P()
    return jax.jit(on_ranks(local, cp_size, in_specs=(P(AXIS), spec_layout), check_vma=check_vma))


@functools.cache
def reduce_function(cp_size: int, op: Any = "sum", *, spec_sharded: bool = False) -> Any:
    """Compiled: x, spec, lse, accumulate → the reduction; all arrays lead with the ranks."""

    def local(x: Any, spec: GroupCastSpec, lse: Any, accumulate: Any) -> Any:
        x, lse, accumulate = jax.tree.map(lambda leaf: leaf[0], (x, lse, accumulate))
        result = group_reduce(x, spec, axis_name=AXIS, op=op, lse=lse, accumulate=accumulate)
        return jax.tree.map(lambda leaf: leaf[None], result)

    spec_layout = P(AXIS) if spec_sharded else P()
    return jax.jit(on_ranks(local, cp_size, in_specs=(P(AXIS), spec_layout, P(AXIS), P(AXIS))))


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)
