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

type Direction = Literal["reduce-scatter", "all-gather", "both passes"]
type Run = Callable[[Any, Any], Any]

OURS, XLA = "ours", "XLA's sequence"
PRODUCT, TRANSFER = "product alone", "transfer alone"
CHUNKS = (2, 4, 8)
NATIVE = CollectiveOptions(implementation="native")
DTYPE = jnp.bfloat16


class Workload(NamedTuple):
    """A product: rows of all ranks, and a rank's weights [inner, columns].

    "both passes" are those of an MLP: the product with gathered rows, and back from ``columns`` to ``inner``.
    """

    name: str
    direction: Direction
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Returns the operations of a rank."""
        products = 6 if self.direction == "both passes" else 1
        return 2.0 * products * self.rows * self.inner * self.columns


class Way(NamedTuple):
    """A way to compute a workload, from arrays of each rank with these shapes."""

    run: Run
    shapes: tuple[tuple[int, int], ...]

    def operands(self, mesh: Mesh) -> tuple[jax.Array, ...]:
        """Draws unit-normal operands, which lead with the ranks' rows."""
        return tuple(
            draw_normal(seed, rows, (width,), DTYPE, mesh) for seed, (rows, width) in enumerate(self.shapes)
        )


def ways(workload: Workload, ranks: int) -> dict[str, Way]:
    """Returns the ways to compute a workload and, of a product, both parts of it alone, by name."""
    if workload.direction == "both passes":
        return _mlps(workload, ranks)
    weights = workload.inner, workload.columns
    scatters = workload.direction == "reduce-scatter"
    own_rows = workload.rows if scatters else workload.rows // ranks
    runs = {OURS: _ours(scatters)} | {
        XLA if count == 1 else f"{count} chunks by hand": _in_chunks(scatters, count, ranks)
        for count in (1, *CHUNKS)
    }
    found = {name: Way(run, ((own_rows, workload.inner), weights)) for name, run in runs.items()}
    found[PRODUCT] = Way(_multiply, ((workload.rows, workload.inner), weights))
    found[TRANSFER] = _transfer(workload, ranks)
    return found


def _mlps(workload: Workload, ranks: int) -> dict[str, Way]:
    """Returns both passes of an MLP whose tokens are spread between its layers, by ours and by XLA."""
    inner, columns = workload.inner, workload.columns
    shapes = (workload.rows // ranks, inner), (inner, columns), (columns, inner)

    def both_passes(gather: Run, scatter: Run) -> Run:
        def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            hidden = jax.nn.gelu(gather((x, up), ()))
            return scatter((hidden, down), ()).astype(jnp.float32).sum()

        return lambda operands, _: jax.grad(loss, (0, 1, 2))(*operands)

    return {
        OURS: Way(both_passes(_ours(scatters=False), _ours(scatters=True)), shapes),
        XLA: Way(both_passes(_in_chunks(False, 1, ranks), _in_chunks(True, 1, ranks)), shapes),
    }


def _ours(scatters: bool) -> Run:
    multiply = matmul_reduce_scatter if scatters else all_gather_matmul
    return lambda operands, _: multiply(operands[0], operands[1], AXIS, options=NATIVE)


def _in_chunks(scatters: bool, count: int, ranks: int) -> Run:
    return _scatter_in_chunks(count, ranks) if scatters else _gather_in_chunks(count)


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
    return Way(lambda operands, _: cast(operands[0]), ((spec.input_rows, width),))
