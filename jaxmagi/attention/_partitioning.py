"""Splits attention over devices through XLA's partitioner, by batch and heads: each device works on its own.

Query heads count as (key heads x group). Where the key heads can be split, query heads are split alike. Where
there are more devices than key heads, devices that share a key head all have it, and add up its gradients.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

from .._dtypes import accumulator_dtype
from .._lowering import Function, LoweringRule
from .._partitioning import (
    DEVICES,
    Partition,
    ShardingRule,
    Tiled,
    Tiles,
    axes_along,
    axis_sizes,
    is_partitioned,
    is_within_shard_map,
    lower_partitioned,
    make_rule,
)
from ._key_heads import add_heads, heads_of, take_heads
from ._sharding import axis_names

type Kind = Literal["rows", "out", "keys", "values", "row_numbers", "bands", "query_heads", "key_heads"]
"""Says what an array is; "row_numbers" are [*B, T, N], "query_heads" [N] and "key_heads" [K]."""


class _Signature(NamedTuple):
    """Lists what the operands and results of a primitive are. Previous results may follow the operands."""

    operands: tuple[Kind, ...]
    results: tuple[Kind, ...]


_FORWARD = _Signature(("rows", "keys", "values", "bands", "query_heads"), ("out", "row_numbers"))
_BACKWARD = _Signature(
    ("rows", "keys", "values", "bands", "out", "row_numbers", "row_numbers"), ("rows", "keys", "values")
)

_SIGNATURES = {"jaxmagi_attention_forward": _FORWARD, "jaxmagi_attention_backward": _BACKWARD}


def lowering(primitive: Primitive, function: Function, variant: Literal["ffi", "xla"]) -> LoweringRule:
    """Returns a lowering rule, which splits the primitive over devices where the program is split.

    Args:
        primitive: the forward or the backward primitive.
        function: computes the primitive on one device, for one batch dimension.
        variant: the implementation that ``function`` is.
    """
    signature = _SIGNATURES[primitive.name]
    local = functools.partial(_fold_batch, function, signature)
    lower = mlir.lower_fun(local, multiple_results=True)

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any) -> Any:
        del implementation  # is what the user asks for, and `variant` is what was chosen
        avals: Sequence[Any] = ctx.avals_in
        query, key, *_ = avals
        if not is_partitioned(ctx) or any(0 in x.shape for x in avals):
            return lower(_without_shardings(ctx), *operands, **params)
        copies = _copies_of_key_heads(ctx, query, key) if signature == _BACKWARD else 1
        if copies > 1:
            bind = functools.partial(primitive.bind, implementation=variant)
            repeated = functools.partial(_with_copies_of_key_heads, bind, copies)
            return _lower_over_auto_axes(repeated, ctx, *operands, **params)
        results: Sequence[Any] = ctx.avals_out
        operation = _Operation(
            function=local,
            params=params,
            signature=_with_previous(signature, len(operands)),
            batch_dims=query.ndim - 3,
            heads=query.shape[-2],
            key_heads=key.shape[-2],
            axis_sizes=axis_sizes(ctx),
            within_shard_map=is_within_shard_map(ctx),
        )
        return lower_partitioned(
            ctx,
            operands,
            counts=(operation.heads, operation.key_heads),
            bind=functools.partial(primitive.bind, implementation=variant, **params),
            rule=operation.rule([x.shape for x in avals], [x.shape for x in results]),
            choose=operation.choose,
            identity=(primitive.name, variant, params),
        )

    return rule


def _copies_of_key_heads(ctx: mlir.LoweringRuleContext, query: Any, key: Any) -> int:
    """Returns how often the backward pass has to repeat each key head, to be split like the query heads.

    It is more than 1 inside of a shard_map alone: there the devices that would have to add up gradients of a
    shared key head are not known. Over Explicit axes the types tell how query heads are split, and each of
    the Auto axes may split them.
    """
    if not is_within_shard_map(ctx):
        return 1
    heads, key_heads, sizes = query.shape[-2], key.shape[-2], axis_sizes(ctx)
    seen = math.prod(sizes[name] for name in axis_names(query.sharding.spec[-2]))
    ways = [seen, *(sizes[name] for name in query.sharding.mesh.auto_axes)]
    copies = math.lcm(*(way // math.gcd(way, key_heads) for way in ways if heads % way == 0))
    return copies if heads // key_heads % copies == 0 else 1


def _lower_over_auto_axes(
    function: Function, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any
) -> Any:
    """Lowers a function as if Explicit mesh axes were Auto: XLA's partitioner then knows how to split it."""
    avals: Sequence[Any] = ctx.avals_in
    mesh = avals[0].sharding.mesh
    mesh = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))

    def over_auto_axes(*operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh):
            return function(*operands, **params)

    unsharded = [x.update(sharding=NamedSharding(mesh, jax.P(*[None] * x.ndim))) for x in avals]
    return mlir.lower_fun(over_auto_axes, multiple_results=True)(
        ctx.replace(avals_in=unsharded), *operands, **params
    )


def _with_copies_of_key_heads(
    bind: Function,
    copies: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *rest: jax.Array,
    grad_dtype: jnp.dtype,
    **params: Any,
) -> list[jax.Array]:
    """Computes gradients with several copies of each key head, and adds up the gradients of the copies."""
    key, value = (jnp.repeat(x, copies, axis=-2) for x in (key, value))
    wide = accumulator_dtype(query.dtype)
    dq, *copied = bind(query, key, value, *rest, grad_dtype=wide, **params)
    sums = (x.reshape(*x.shape[:-2], -1, copies, x.shape[-1]).sum(axis=-2) for x in copied)
    return [x.astype(grad_dtype) for x in (dq, *sums)]


def _without_shardings(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """Returns the context without shardings in its types: one device may be a mesh of Explicit axes."""
    avals: Sequence[Any] = ctx.avals_in
    if not any(any(x.sharding.spec) for x in avals):
        return ctx
    return ctx.replace(
        avals_in=[x.update(sharding=x.sharding.update(spec=jax.P(*[None] * x.ndim))) for x in avals]
    )


def _with_previous(signature: _Signature, count: int) -> _Signature:
    """Returns the signature with the previous results among the operands, if there are so many."""
    if count == len(signature.operands):
        return signature
    return signature._replace(operands=(*signature.operands, *signature.results))


def _fold_batch(
    function: Function, signature: _Signature, *operands: jax.Array, **params: Any
) -> list[jax.Array]:
    """Runs a function for one batch dimension on operands with any number of them."""
    batch = operands[0].shape[:-3]
    kinds = _with_previous(signature, len(operands)).operands
    folded = [_fold(x, kind, batch) for x, kind in zip(operands, kinds, strict=True)]
    return [x.reshape(*batch, *x.shape[1:]) for x in function(*folded, **params)]


def _fold(x: jax.Array, kind: Kind, batch: tuple[int, ...]) -> jax.Array:
    if kind == "query_heads":
        return x
    lead, rest = x.shape[: len(batch)], x.shape[len(batch) :]
    if lead != batch and math.prod(lead) > 1:  # bands that some of the batch dimensions share
        x, lead = jnp.broadcast_to(x, (*batch, *rest)), batch
    return x.reshape(math.prod(lead), *rest)


_WITH_HEADS = ("rows", "out", "keys", "values")
_REPLICATED = ("d", "e", "bands", "numbers", "one")  # beginnings of the factors that must not be sharded


class _Operation(NamedTuple):
    """Holds a call of a primitive that is to be split.

    Behind its operands the call gets the numbers of all query heads and of all key heads. They are split like
    the heads, and tell a device which heads it has.
    """

    function: Function  # what one device runs
    params: dict[str, Any]
    signature: _Signature
    batch_dims: int
    heads: int
    key_heads: int
    axis_sizes: dict[str, int]  # the mesh axes that the partitioner splits over
    within_shard_map: bool

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Lists what the operands are."""
        return *self.signature.operands, "query_heads", "key_heads"

    def rule(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> ShardingRule:
        """Returns how shardings propagate. Those of lengths do too, and `choose` reports them."""
        operands = (*operands, (self.heads,), (self.key_heads,))
        sides = [
            [self._factors(*array) for array in zip(kinds, shapes, strict=True)]
            for kinds, shapes in ((self.kinds, operands), (self.signature.results, results))
        ]
        sizes = {"g": self.heads // self.key_heads} if self._query_head_factors() == "(k g)" else {}
        return make_rule(*sides, is_replicated=lambda factor: factor.startswith(_REPLICATED), sizes=sizes)

    def _factors(self, kind: Kind, shape: tuple[int, ...]) -> list[str]:
        """Returns the factors of the dimensions of an array."""
        batch = [f"b{i}" if size > 1 else f"one{i}" for i, size in enumerate(shape[: self.batch_dims])]
        key_heads = "k" if self.key_heads > 1 else "one"
        heads = self._query_head_factors()
        factors: dict[Kind, list[str]] = {
            "rows": [*batch, "t", heads, "d"],
            "out": [*batch, "t", heads, "e"],
            "keys": [*batch, "s", key_heads, "d"],
            "values": [*batch, "s", key_heads, "e"],
            "row_numbers": [*batch, "t", heads],
            "bands": [*batch, "bands", "numbers"],
            "query_heads": [heads],
            "key_heads": [key_heads],
        }
        return factors[kind]

    def _query_head_factors(self) -> str:
        """Returns the factors of key heads and groups if every mesh axis fits one of the two, else one."""
        if self.key_heads in (1, self.heads):
            return "g" if self.key_heads == 1 else "k"
        fit = (size % self.key_heads == 0 or self.key_heads % size == 0 for size in self.axis_sizes.values())
        return "(k g)" if all(fit) else "h"

    def choose(self, operands: Sequence[Tiled], results: Sequence[Tiled]) -> Partition:
        """Splits the operation like that operand or result which is cut into most tiles."""
        for name, x in zip(("query", "key", "value"), operands, strict=False):
            for dim, what in ((self.batch_dims, "length"), (self.batch_dims + 2, "head dimension")):
                if x.tiles.counts[dim] > 1:
                    warn_of_gather(name, what, self._axes_along(x, dim))
        arrays = list(zip((*self.kinds, *self.signature.results), (*operands, *results), strict=True))
        split = self._split([x for kind, x in arrays if kind in _WITH_HEADS])
        tiles = [self._tiles(split, kind, x.shape) for kind, x in arrays]
        function = functools.partial(self._run, split)
        return Partition(function, tiles[: len(operands)], tiles[len(operands) :])

    def _axes_along(self, x: Tiled, dim: int) -> tuple[str, ...]:
        """Returns the mesh axes that a dimension is sharded over: inside of a shard_map, all candidates."""
        return tuple(self.axis_sizes) if self.within_shard_map else axes_along(x.tiles, dim, self.axis_sizes)

    def _split(self, arrays: Sequence[Tiled]) -> Tiles:
        """Returns the tiles along batch dimensions, key heads and groups: [*B, K, N // K, copies]."""
        most = max(map(self._even_tiles, arrays), key=lambda tiles: tiles.total)
        *batch, heads, copies = most.devices.shape
        key_heads = math.gcd(heads, self.key_heads)
        split = Tiles(most.devices.reshape(*batch, key_heads, heads // key_heads, copies))
        if not self.within_shard_map or self.signature != _BACKWARD:
            return split
        # Inside of a shard_map the devices that would have to add up gradients are not known.
        dims = range(self.batch_dims + 1)
        return split.keep(*dims).embed(self.batch_dims + 2, dims)

    def _even_tiles(self, x: Tiled) -> Tiles:
        """Returns the tiles along batch and heads [*B, heads, copies], as far as all are of one size."""
        dims = (*range(self.batch_dims), self.batch_dims + 1)
        even = x.even(dims)
        return x.tiles.keep(*even).embed(len(dims), [dims.index(i) for i in even])

    def _tiles(self, split: Tiles, kind: Kind, shape: tuple[int, ...]) -> Tiles:
        """Returns the tiles of an operand or a result."""
        batch = range(self.batch_dims)
        *counts, key_heads, group, copies = split.devices.shape
        heads = Tiles(split.devices.reshape(*counts, key_heads * group, copies))
        match kind:
            case "rows" | "out" | "row_numbers":
                return heads.embed(len(shape), (*batch, self.batch_dims + 1))
            case "keys" | "values":
                kept = split.keep(*batch, self.batch_dims)
                return kept.embed(len(shape), (*batch, self.batch_dims + 1))
            case "bands":
                own = [i for i in batch if shape[i] > 1]
                return split.keep(*own).embed(len(shape), own)
            case "query_heads":
                return heads.keep(self.batch_dims)
            case "key_heads":
                return split.keep(self.batch_dims)

    def _run(self, split: Tiles, *shards: jax.Array) -> Sequence[jax.Array]:
        """Computes the operation on one device."""
        *operands, query_heads, key_heads = shards
        if split.counts[-1] == 1:
            return self.function(*operands, **self.params)
        heads = heads_of(query_heads, key_heads[0], self.heads // self.key_heads)
        query, key, value, *rest = operands
        run = functools.partial(self.function, query, take_heads(key, heads), take_heads(value, heads), *rest)
        if self.signature != _BACKWARD:
            return run(**self.params)
        dtype = self.params["grad_dtype"]
        dq, *gradients = run(**self.params | {"grad_dtype": accumulator_dtype(query.dtype)})
        groups = split.devices.swapaxes(-1, -2).reshape(-1, split.counts[-1]).tolist()
        whole = [add_heads(x, heads, key.shape[-2]) for x in gradients]
        sums = jax.lax.psum(whole, DEVICES, axis_index_groups=groups)
        return [x.astype(dtype) for x in (dq, *sums)]


@functools.cache
def warn_of_gather(name: str, what: str, axes: tuple[str, ...]) -> None:
    """Warns once for each operand, dimension and mesh axis."""
    over = f" over mesh axis {', '.join(axes)}" if axes else ""
    warnings.warn(
        f"jaxmagi.attention gathers {name}, which is sharded in its {what}{over}: it works on whole "
        "sequences and heads. To have its batch or heads sharded instead, constrain query, key and value by "
        "jax.lax.with_sharding_constraint; jaxmagi.context_attention spreads a sequence over a mesh axis.",
        RuntimeWarning,
        stacklevel=1,
    )
