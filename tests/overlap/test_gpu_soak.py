"""Ten thousand products with a collective between collectives of XLA, and ranks that come late."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ..collectives.conftest import group as group  # a fixture
from ..collectives.groups import Group, assert_equal, on_groups
from ..collectives.harness import AXIS
from .harness import PRODUCTS

CALLS = 10_000
INNER = 200
SHAPES = ((130, 64), (600, 520))
"""These are rows of a rank and columns, of one tile and of several."""


def small_integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws numbers so small that bfloat16 has sums of some hundred of their products exactly."""
    return rng.integers(-1, 2, shape).astype(jnp.bfloat16)


def make_program(group: Group, steps: int) -> Any:
    """Returns a compiled function of rows and weights, which counts wrong results of both products.

    It is a scan of so many steps. In each one a rank comes late, by another number of matmuls, and rows go to
    the next rank.
    """
    ring = [(i, (i + 1) % group.size) for i in range(group.size)]

    def delay(rank: jax.Array, i: jax.Array, hidden: jax.Array) -> jax.Array:
        """Multiplies for up to some 100 microseconds."""
        return lax.fori_loop(0, (7 * i + 3 * rank) % 5, lambda _, h: jnp.tanh(h @ h), hidden)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array, jax.Array], i: jax.Array) -> Any:
            x, hidden, wrong = carry
            hidden = delay(lax.axis_index(AXIS), i, hidden)
            x = x + 0 * hidden[:1, :1].astype(x.dtype)  # behind the delay
            turned = jnp.roll(w[0], i, axis=1)
            parts = [jnp.roll(x, part, axis=0) for part in range(group.size)]  # another one for each rank
            rows = {"all_gather": x, "reduce_scatter": jnp.concatenate(parts)}
            for name, z in rows.items():
                ours = PRODUCTS[name].function(z, turned, AXIS, options=group.options)
                wrong += jnp.count_nonzero(ours != PRODUCTS[name].plain(z, turned, AXIS)).astype(jnp.int32)
            return (lax.ppermute(x, AXIS, ring), hidden, wrong), None

        zeros = lax.pcast((jnp.zeros((512, 512)), jnp.int32(0)), AXIS, to="varying")
        return lax.scan(step, (x[0], *zeros), jnp.arange(steps))[0][2][None]

    return group.program(local, P(AXIS))


def check_soak(group: Group, calls: int) -> None:
    """Programs of all shapes take turns; each step has two calls."""
    steps = min(calls // 4, 125)
    rng = np.random.default_rng(group.size)
    program = make_program(group, steps)
    operands = [
        group.shard(
            (
                small_integers(rng, group.size, rows, INNER),
                small_integers(rng, group.size, INNER, columns),
            )
        )
        for rows, columns in SHAPES
    ]
    wrong = [program(*operands[i % len(SHAPES)]) for i in range(calls // (2 * steps))]
    for count in wrong:
        assert_equal(count, np.zeros(group.size, np.int32))


@on_groups(*[Group("native", size) for size in (2, 4)])
def test_soak(group: Group) -> None:
    check_soak(group, 8 if group.implementation == "xla" else CALLS)
