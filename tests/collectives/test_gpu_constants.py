"""Reductions of constants of the program, which XLA does not make in its memory pool."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec
from jaxmagi.collectives import _cuda

from .groups import SEVERAL, Group, assert_close, on_groups
from .harness import AXIS, normal
from .routes import random_transfer


def behind_tuples(program: str, name: str) -> str:
    """The value a name stands for: a tuple names its parts' memory, it copies nothing."""
    part = re.search(rf" {re.escape(name)} = .* get-tuple-element\((\S+)\), index=(\d+)", program)
    whole = part and re.search(rf" {re.escape(part[1])} = .* tuple\((.*?)\)", program)
    return behind_tuples(program, whole[1].split(", ")[int(part[2])]) if part and whole else name


def operands_of_reductions(program: str) -> list[list[str]]:
    """The operands of each of our calls in a compiled program."""
    program = re.sub(r"/\*.*?\*/", "", program)  # counts of operands
    calls = re.findall(rf'custom-call\((.*?)\), custom_call_target="{_cuda.REDUCE}"', program)
    return [[behind_tuples(program, name) for name in call.split(", ")] for call in calls]


def check_constants(group: Group) -> None:
    """A constant is reduced alone, and another one together with an array that is none."""
    rng = np.random.default_rng(0)
    transfer = random_transfer(rng, group.size)
    rows = transfer.spec.output_rows
    first, second = (normal(rng, rows, width) for width in (4, 8))
    y = normal(rng, group.size, rows, 12)

    def local(y: jax.Array, spec: GroupCastSpec) -> Any:
        alone = group.reduce(jnp.asarray(first), spec)
        together = group.reduce([jnp.asarray(second), y[0]], spec)
        return [total[None] for total in (alone, *together)]

    operands = group.shard(y), group.replicate(transfer.spec)
    run = group.program(local, (P(AXIS), P())).lower(*operands).compile()
    if group.implementation != "xla":
        found = operands_of_reductions(run.as_text())
        assert [sum(name.startswith("%constant") for name in call) for call in found] == [1, 1], found
    everywhere = [np.stack([x] * group.size) for x in (first, second)]
    for _ in range(3):
        assert_close(run(*operands), [transfer.reduce_sum(x) for x in (*everywhere, y)], 1e-6)


@on_groups(*SEVERAL)
def test_constants(group: Group) -> None:
    check_constants(group)
