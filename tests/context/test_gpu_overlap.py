"""Transfers run beside attention: read from the profile of a program on GPUs, kernel by kernel."""

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmagi import context_attention, masks, plan_context

from .harness import AXIS, make_mesh

pytestmark = pytest.mark.gpu

TOKENS, HEADS, KV_HEADS, DIM = 16384, 32, 8, 128
FORWARD, BACKWARD, CAST, RETURN = "forward_kernel", "backward_kernel", "push", "pull"


class Interval(NamedTuple):
    begin: float
    end: float

    def shared_with(self, other: "Interval") -> float:
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


def profiled_kernels(function: Any, operands: Any, folder: Path) -> dict[str, dict[str, list[Interval]]]:
    """Returns when the kernels of a call ran, in nanoseconds: by device, then by name, in order."""
    jax.block_until_ready(function(*operands))
    with jax.profiler.trace(folder):
        jax.block_until_ready(function(*operands))
    (path,) = folder.rglob("*.xplane.pb")
    kernels: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for event in (event for line in plane.lines for event in line.events):
            for name in (FORWARD, BACKWARD, CAST, RETURN):
                if f"::{name}<" in event.name or f"::{name}(" in event.name or event.name == name:
                    interval = Interval(event.start_ns, event.start_ns + event.duration_ns)
                    kernels[plane.name][name].append(interval)
    return {device: {name: sorted(found) for name, found in each.items()} for device, each in kernels.items()}


def hidden_share(transfers: list[Interval], attention: list[Interval]) -> float:
    """Returns which share of the transfers' time some attention kernel runs too."""
    begin, covered = min(transfers).begin, 0.0
    for kernel in sorted(attention):
        rest = Interval(max(begin, kernel.begin), kernel.end)
        covered += sum(transfer.shared_with(rest) for transfer in transfers if rest.begin < rest.end)
        begin = max(begin, kernel.end)
    return covered / sum(end - start for start, end in transfers)


@pytest.mark.parametrize("cp_size", [2], indirect=True)
def test_transfers_run_beside_attention(cp_size: int, tmp_path: Path) -> None:
    """The first cast has nothing to run beside, and so has the last return."""
    mesh = make_mesh(cp_size)
    plan = plan_context(masks.full(TOKENS), cp_size)
    sharding = NamedSharding(mesh, P(AXIS))
    operands = [
        jax.device_put(jax.random.normal(jax.random.key(seed), (TOKENS, heads, DIM), jnp.bfloat16), sharding)
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))
    ]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return context_attention(query, key, value, plan, axis_name=AXIS)

    @jax.jit
    def both(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, query, key, value)
        return out, vjp(dout)

    with jax.set_mesh(mesh):
        kernels = profiled_kernels(both, operands, tmp_path)
    assert len(kernels) == cp_size, f"there are profiles of {sorted(kernels)}"
    for found in kernels.values():
        casts, returns = found[CAST], found[RETURN]
        assert len(casts) == 2 * len(returns) == 2 * KV_HEADS
        forward, backward = casts[:KV_HEADS], casts[KV_HEADS:]
        assert hidden_share(forward[1:], found[FORWARD]) > 0.5
        assert hidden_share(backward[1:], found[BACKWARD]) > 0.5
        assert hidden_share(returns[:-1], found[BACKWARD]) > 0.5
