"""Ten thousand calls, each with another spec, between collectives of XLA and matmuls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec

from .groups import Group, assert_equal, on_groups
from .harness import AXIS
from .routes import INPUT_ROWS, random_transfer

SPECS = 20
CALLS = 10_000


def make_program(group: Group, steps: int, dtype: Any) -> Any:
    """Compiled: x, routes → (x after some steps, what the matmuls gave, what was wrong), by a scan.

    In each step x goes to the next rank. x holds small integers, so that all sums are exact.
    """
    ring = [(i, (i + 1) % group.size) for i in range(group.size)]

    def local(x: jax.Array, specs: GroupCastSpec, sources: jax.Array, counts: jax.Array) -> Any:
        def step(carry: tuple[jax.Array, jax.Array, jax.Array], i: jax.Array) -> Any:
            x, hidden, wrong = carry
            spec = jax.tree.map(lambda table: table[i], specs)
            cast = group.cast(x, spec)
            back = group.reduce(cast, spec)
            hidden = jnp.tanh(hidden @ hidden + back[:1, :1].astype(jnp.float32))
            everyone = jax.lax.all_gather(x, AXIS, tiled=True)
            total = jax.lax.psum(x.astype(jnp.float32), AXIS)
            source = sources[0, i][:, None]
            wanted = jnp.where(source < 0, 0, everyone[source[:, 0]])
            differences = (
                cast != wanted,
                back != counts[0, i][:, None].astype(dtype) * x,
                total != everyone.reshape(-1, *x.shape).astype(jnp.float32).sum(0),
            )
            wrong += jnp.stack([jnp.count_nonzero(d) for d in differences]).astype(jnp.int32)
            return (jax.lax.ppermute(x, AXIS, ring), hidden, wrong), None

        zeros = jax.lax.pcast((jnp.zeros((256, 256)), jnp.zeros(3, jnp.int32)), AXIS, to="varying")
        order = jnp.arange(steps, dtype=jnp.int32) % SPECS
        results, _ = jax.lax.scan(step, (x[0], *zeros), order)
        return jax.tree.map(lambda leaf: leaf[None], results)

    return group.program(local, (P(AXIS), P(), P(AXIS), P(AXIS)))


def check_soak(group: Group, calls: int) -> None:
    """Two programs take turns; each step has two calls."""
    steps = min(calls // 4, 125)
    rng = np.random.default_rng(group.size)
    transfers = [random_transfer(rng, group.size) for _ in range(SPECS)]
    specs = group.replicate(jax.tree.map(lambda *tables: np.stack(tables), *(t.spec for t in transfers)))
    routes = group.shard(
        (
            np.stack([t.source_numbers() for t in transfers], 1),
            np.stack([t.counts() for t in transfers], 1).astype(np.int32),
        )
    )
    programs = [make_program(group, steps, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    states = [
        group.shard(rng.integers(-8, 9, (group.size, INPUT_ROWS, width)).astype(dtype))
        for dtype, width in ((np.float32, 24), (jnp.bfloat16, 8))
    ]
    errors = []
    for i in range(calls // (2 * steps)):
        states[i % 2], _, wrong = programs[i % 2](states[i % 2], specs, *routes)
        errors.append(wrong)
    for wrong in errors:
        assert_equal(wrong, np.zeros((group.size, 3), np.int32))


@on_groups(*[Group(kind, size) for kind in ("native", "nccl") for size in (2, 4)])
def test_soak(group: Group) -> None:
    check_soak(group, 40 if group.implementation == "xla" else CALLS)
