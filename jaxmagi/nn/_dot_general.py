"""`dot_general` for Flax's dense layers whose weights are spread over a mesh axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
from jax.sharding import PartitionSpec as P

from jaxmagi._checks import require_type
from jaxmagi._varying import checks_vma, vary_alike
from jaxmagi.attention import MeshAxes, axis_names, reshard
from jaxmagi.collectives import CollectiveOptions, check_options
from jaxmagi.overlap import all_gather_matmul, matmul_reduce_scatter

type DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def column_parallel_dot_general(
    axis_name: str,
    *,
    batch_axis_name: MeshAxes = None,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> "ParallelDotGeneral":
    """Returns the ``dot_general`` of a dense layer whose weights are cut by columns over a mesh axis.

    Tokens come in cut over the axis, and leave it whole, with this rank's columns: the first layer of a
    Megatron block with sequence parallelism, by `jaxmagi.all_gather_matmul`. Use it as
    ``nnx.Linear(..., dot_general=jaxmagi.nn.column_parallel_dot_general("tensor"))``, also of
    ``nnx.LinearGeneral`` and linen's ``Dense`` and ``DenseGeneral``.

    Inside ``jax.shard_map`` over the axis it takes local arrays. Outside, with the mesh of ``jax.set_mesh``,
    it takes whole ones, and maps itself over the axis.

    Args:
        axis_name: mesh axis of the ranks. It divides the tokens, in the last dimension before those that are
            contracted, and the first dimension of the weights that is not contracted.
        batch_axis_name: mesh axis, or axes, over which the first dimension of the tokens is sharded, if they
            have one before. None: Explicit axes as tokens are. Over Auto axes XLA's partitioner would gather
            the batch around each collective: name them.
        options: as of `jaxmagi.all_gather_matmul`.

    Returns:
        A function like ``jax.lax.dot_general``, for products that contract the last dimensions of their first
        operand with the first ones of their second. It raises ValueError for sizes that the axis does not
        divide or that do not fit, and NotImplementedError for other products, and for a ``precision``, a
        ``preferred_element_type`` or an ``out_sharding``.

    Raises:
        ValueError: the axis name is no string, or the options are none.
    """
    return ParallelDotGeneral(axis_name, batch_axis_name, options, "columns")


def row_parallel_dot_general(
    axis_name: str,
    *,
    batch_axis_name: MeshAxes = None,
    options: CollectiveOptions = CollectiveOptions(),  # noqa: B008 (frozen, so safe to share)
) -> "ParallelDotGeneral":
    """Returns the ``dot_general`` of a dense layer whose weights are cut by rows over a mesh axis.

    It follows a layer with `column_parallel_dot_general`. Tokens come in whole, with this rank's features,
    and leave cut over the axis, with all features: sums over ranks by `jaxmagi.matmul_reduce_scatter`.

    Args:
        axis_name: mesh axis of the ranks. It divides the tokens, in the last dimension before those that are
            contracted, and the first dimension that is contracted.
        batch_axis_name: as of `column_parallel_dot_general`.
        options: as of `jaxmagi.matmul_reduce_scatter`.

    Returns:
        As of `column_parallel_dot_general`.

    Raises:
        ValueError: the axis name is no string, or the options are none.
    """
    return ParallelDotGeneral(axis_name, batch_axis_name, options, "rows")


@dataclass(frozen=True)
class ParallelDotGeneral:
    """Multiplies as a dense layer of Flax does. Equal ones make one compiled program.

    Attributes:
        axis_name: the mesh axis.
        batch_axis_name: mesh axes of the first dimension.
        options: how rows travel.
        weights: how weights are cut.
    """

    axis_name: str
    batch_axis_name: MeshAxes
    options: CollectiveOptions
    weights: Literal["columns", "rows"]

    def __post_init__(self) -> None:
        require_type(self.axis_name, str, "axis_name")
        check_options("options", self.options)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: None = None,
        preferred_element_type: None = None,
        out_sharding: None = None,
    ) -> jax.Array:
        for name, value in (
            ("precision", precision),
            ("preferred_element_type", preferred_element_type),
            ("out_sharding", out_sharding),
        ):
            if value is not None:
                raise NotImplementedError(f"{name}={value!r}: products over a mesh axis take none.")
        count = _count_contracted(lhs, rhs, dimension_numbers)
        mesh = jax.sharding.get_abstract_mesh()
        if self.axis_name in mesh.manual_axes:
            return self._multiply(lhs, rhs, count)
        for name in (self.axis_name, *axis_names(self.batch_axis_name)):
            if name not in mesh.axis_names:
                raise ValueError(
                    f"{name!r} is no axis of the mesh, which has {tuple(mesh.axis_names)}: call inside "
                    "jax.shard_map over it, or set the mesh by jax.set_mesh."
                )
        return self._on_mesh(lhs, rhs, count)

    def _multiply(self, lhs: jax.Array, rhs: jax.Array, count: int) -> jax.Array:
        """Multiplies the arrays of a rank, of which so many dimensions are contracted."""
        multiply = all_gather_matmul if self.weights == "columns" else matmul_reduce_scatter
        inner, outer = math.prod(rhs.shape[:count]), math.prod(rhs.shape[count:])
        x = lhs.reshape(*lhs.shape[: lhs.ndim - count], inner)
        y = multiply(x, rhs.reshape(inner, outer), self.axis_name, options=self.options)
        return y.reshape(*y.shape[:-1], *rhs.shape[count:])

    def _on_mesh(self, lhs: jax.Array, rhs: jax.Array, count: int) -> jax.Array:
        """Multiplies whole arrays, mapped over the mesh axis and those of the batch."""
        contracted = lhs.ndim - count
        tokens, out_ndim = contracted - 1, contracted + rhs.ndim - count
        batch = self._batch_axes(lhs, tokens)
        cuts = (tokens, count, contracted) if self.weights == "columns" else (contracted, 0, tokens)
        self._check_divides("tokens", lhs.shape[tokens])
        what = "first output dimension" if self.weights == "columns" else "first contracted dimension"
        self._check_divides(what, rhs.shape[cuts[1]])
        left = self._spec(lhs.ndim, cuts[0], batch)
        right = self._spec(rhs.ndim, cuts[1], ())
        lhs, rhs = vary_alike((lhs, rhs))  # what a surrounding shard_map has mapped over
        return jax.shard_map(
            lambda x, w: self._multiply(x, w, count),
            in_specs=(left, right),
            out_specs=self._spec(out_ndim, cuts[2], batch),
            axis_names={self.axis_name, *(name for axes in batch for name in axis_names(axes))},
            check_vma=_checks_vma(),
        )(reshard(lhs, left), reshard(rhs, right))

    def _batch_axes(self, lhs: jax.Array, tokens: int) -> tuple[MeshAxes, ...]:
        """Returns the mesh axes that each dimension before the tokens is sharded over."""
        if self.batch_axis_name is not None:
            if tokens == 0:
                raise ValueError(
                    f"batch_axis_name={self.batch_axis_name!r} needs lhs [batch, ..., tokens, features], but "
                    f"it has shape {lhs.shape}."
                )
            manual = jax.sharding.get_abstract_mesh().manual_axes
            left = tuple(name for name in axis_names(self.batch_axis_name) if name not in manual)
            return (left or None,)
        *batch, over = tuple(jax.typeof(lhs).sharding.spec)[: tokens + 1]
        if over not in (None, self.axis_name, (self.axis_name,)):
            raise ValueError(f"lhs {lhs.shape} has its tokens sharded over {over!r}, not {self.axis_name!r}.")
        return tuple(batch)

    def _spec(self, ndim: int, cut: int, batch: tuple[MeshAxes, ...]) -> P:
        """Returns the spec of an array that is cut over the mesh axis along one dimension."""
        entries = [*batch, *[None] * (ndim - len(batch))]
        entries[cut] = self.axis_name
        return P(*entries)

    def _check_divides(self, what: str, count: int) -> None:
        size = jax.sharding.get_abstract_mesh().shape[self.axis_name]
        if count % size:
            raise ValueError(
                f"The size {size} of mesh axis {self.axis_name!r} does not divide the {what}, {count}."
            )


def _count_contracted(lhs: jax.Array, rhs: jax.Array, dimension_numbers: DimensionNumbers) -> int:
    """Returns how many of the last dimensions of lhs are contracted with as many first ones of rhs."""
    (left, right), batch = dimension_numbers
    count = len(left)
    last, first = tuple(range(lhs.ndim - count, lhs.ndim)), tuple(range(count))
    if tuple(left) != last or tuple(right) != first or any(map(len, batch)) or not 0 < count < rhs.ndim:
        raise NotImplementedError(
            f"{dimension_numbers=}: products over a mesh axis contract the last dimensions of their first "
            "operand with the first ones of their second, and have no batch dimensions."
        )
    if lhs.shape[lhs.ndim - count :] != rhs.shape[:count]:
        raise ValueError(
            f"lhs must end with the dimensions that rhs begins with, {count} of them, but they have shapes "
            f"{lhs.shape} and {rhs.shape}."
        )
    if lhs.ndim == count:
        raise ValueError(f"lhs must be [..., tokens, features], but it has shape {lhs.shape}.")
    return count


def _checks_vma() -> bool:
    """Returns whether a nested shard_map has to check what varies: as the surrounding one does."""
    return all(map(checks_vma, jax.sharding.get_abstract_mesh().manual_axes))
