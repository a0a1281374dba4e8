"""Ways to multiply with a collective in JAX: ours, and what `jax.lax` has."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxmagi import (
    CollectiveOptions,
    GroupCastSpec,
    all_gather_matmul,
    group_cast,
    matmul_reduce_scatter,
)
from jaxmagi.calibration._chain import AXIS, draw_normal

type Direction = Literal["reduce-scatter", "all-gather"]
type Run = Callable[[Any, Any], Any]

OURS, XLA = "ours", "XLA's sequence"
PRODUCT, TRANSFER = "product alone", "transfer alone"
CHUNKS = (2, 4, 8)
NATIVE = CollectiveOptions(implementation="native")
DTYPE = jnp.bfloat16


class Workload(NamedTuple):
    """A product: rows of all ranks, and a rank's weights [inner, columns]."""

    name: str
    direction: Direction
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Returns the operations of a rank."""
        return 2.0 * self.rows * self.inner * self.columns


class Way(NamedTuple):
    """A way to compute a workload: from rows of each rank, of so many numbers, and its weights.

    Without ``columns`` it has no weights.
    """

    run: Run
    rows: int
    width: int
    columns: int = 0

    def operands(self, mesh: Mesh) -> tuple[jax.Array, ...]:
        """Draws unit-normal operands, which lead with the ranks' rows."""
        x = draw_normal(0, self.rows, (self.width,), DTYPE, mesh)
        return (x, draw_normal(1, self.width, (self.columns,), DTYPE, mesh)) if self.columns else (x,)


def ways(workload: Workload, ranks: int) -> dict[str, Way]:
    """Returns the ways to compute a workload, and its product and its transfer alone, by name."""
    scatters = workload.direction == "reduce-scatter"
    ours = matmul_reduce_scatter if scatters else all_gather_matmul
    runs: dict[str, Run] = {
        OURS: lambda operands, _: ours(operands[0], operands[1], AXIS, options=NATIVE),
        XLA: _scatter_in_chunks(1, ranks) if scatters else _gather_in_chunks(1),
    }
    for count in CHUNKS:
        run = _scatter_in_chunks(count, ranks) if scatters else _gather_in_chunks(count)
        runs[f"{count} chunks by hand"] = run
    rows = workload.rows if scatters else workload.rows // ranks
    found = {name: Way(run, rows, workload.inner, workload.columns) for name, run in runs.items()}
    found[PRODUCT] = Way(_multiply, workload.rows, workload.inner, workload.columns)
    found[TRANSFER] = _transfer(workload, ranks)
    return found


def _multiply(operands: Any, _: Any) -> jax.Array:
    x, w = operands
    return x @ w


def _scatter_in_chunks(count: int, ranks: int) -> Run:
    """Multiplies some rows for each rank, and scatters their sums while it multiplies the next ones."""

    def run(operands: Any, _: Any) -> jax.Array:
        x, w = operands
        chunks = x.reshape(ranks, count, -1, x.shape[1])
        parts = [chunks[:, i].reshape(-1, x.shape[1]) @ w for i in range(count)]
        return jnp.concatenate([lax.psum_scatter(part, AXIS, tiled=True) for part in parts])

    return run


def _gather_in_chunks(count: int) -> Run:
    """Gathers some rows of each rank while it multiplies those before."""

    def run(operands: Any, _: Any) -> jax.Array:
        x, w = operands
        gathered = [lax.all_gather(chunk, AXIS) for chunk in jnp.split(x, count)]
        return jnp.concatenate([rows @ w for rows in gathered], axis=1).reshape(-1, w.shape[1])

    return run


def _transfer(workload: Workload, ranks: int) -> Way:
    """Returns the transfer by our group cast: rows of the product to each other rank, or own rows to all."""
    rows = workload.rows // ranks
    others = [[[peer] for peer in range(ranks) if peer != rank] for rank in range(ranks)]
    if workload.direction == "reduce-scatter":
        splits, targets, width = [[rows] * (ranks - 1)] * ranks, others, workload.columns
    else:
        everyone = [[[peer for [peer] in targets]] for targets in others]
        splits, targets, width = [[rows]] * ranks, everyone, workload.inner
    sources = [[peer for [peer] in targets] for targets in others]
    spec = GroupCastSpec.from_splits(splits, targets, [[rows] * (ranks - 1)] * ranks, sources)
    cast = functools.partial(group_cast, spec=spec, axis_name=AXIS)
    return Way(lambda operands, _: cast(operands[0]), spec.input_rows, width)
