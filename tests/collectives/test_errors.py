"""What users get told."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import GroupCastSpec, group_cast, group_reduce

from .harness import AXIS, make_mesh

SPEC = GroupCastSpec.from_splits([[2], [2]], [[[1]], [[0]]], [[2], [2]], [[1], [0]])
X = np.zeros((4, 3), np.float32)
LSE = np.zeros(4, np.float32)


def run(function: Callable[..., Any], *, cp_size: int = 2, spec: Any = SPEC, check_vma: bool = True) -> Any:
    mapped = jax.shard_map(
        lambda x, lse: function(x, lse, spec),
        mesh=make_mesh(cp_size),
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        check_vma=check_vma,
    )
    return jax.eval_shape(
        mapped, np.tile(X, (cp_size, 1))[: 2 * cp_size], np.tile(LSE, cp_size)[: 2 * cp_size]
    )


def cast(x: jax.Array, lse: jax.Array, spec: Any) -> Any:
    return group_cast(x, spec, axis_name=AXIS)


def test_the_call_itself_is_right() -> None:
    assert run(cast).shape == (4, 3)


def test_unknown_axis() -> None:
    message = (
        "axis_name='ring' is no mesh axis that a surrounding jax.shard_map maps over; those are ('context',)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        run(lambda x, lse, spec: group_cast(x, spec, axis_name="ring"))
    with pytest.raises(ValueError, match=re.escape("'context' is no mesh axis")):
        group_cast(X[:2], SPEC, axis_name=AXIS)


@pytest.mark.parametrize("check_vma", [True, False])
def test_spec_for_other_ranks(check_vma: bool) -> None:
    with pytest.raises(ValueError, match="the spec is for 2 ranks, but mesh axis 'context' has size 4"):
        run(cast, cp_size=4, check_vma=check_vma)
    single = GroupCastSpec.from_splits([[2]], [[[0]]], [[2]], [[0]])
    with pytest.raises(ValueError, match="the spec is for 1 ranks, but mesh axis 'context' has size 2"):
        run(cast, spec=single, check_vma=check_vma)


def test_wrong_rows() -> None:
    with pytest.raises(
        ValueError, match=re.escape("x must have 2 rows on each rank, as its spec, but has shape (1, 3)")
    ):
        run(lambda x, lse, spec: group_cast(x[:1], spec, axis_name=AXIS))
    with pytest.raises(
        ValueError, match=re.escape("x must have 2 rows on each rank, as its spec, but has shape (1, 3)")
    ):
        run(lambda x, lse, spec: group_reduce(x[:1], spec, axis_name=AXIS))


def test_no_spec_or_many() -> None:
    with pytest.raises(ValueError, match=re.escape("spec must be a jaxmagi.GroupCastSpec, but it is tuple")):
        run(cast, spec=())
    stacked = jax.tree.map(lambda table: table[None], SPEC)
    with pytest.raises(ValueError, match=r"sends must be \[cp, M, 5\], but has shape .*: use jax.vmap"):
        run(cast, spec=stacked)
    narrow = dataclasses.replace(SPEC, sends=SPEC.sends[..., :4])
    with pytest.raises(ValueError, match=r"spec.sends must be \[cp, M, 5\], but has shape \(2, \d+, 4\)\."):
        run(cast, spec=narrow)


def test_op() -> None:
    with pytest.raises(
        ValueError, match=re.escape("op must be one of ('sum', 'avg', 'lse'), but it is 'max'")
    ):
        op: Any = "max"
        run(lambda x, lse, spec: group_reduce(x, spec, axis_name=AXIS, op=op))


def test_lse_missing_or_superfluous() -> None:
    with pytest.raises(
        ValueError, match="lse goes with op='lse' and only with it, but op='lse' and lse is None"
    ):
        run(lambda x, lse, spec: group_reduce(x, spec, axis_name=AXIS, op="lse"))
    with pytest.raises(
        ValueError, match="lse goes with op='lse' and only with it, but op='sum' and lse is an"
    ):
        run(lambda x, lse, spec: group_reduce(x, spec, axis_name=AXIS, lse=lse))
    with pytest.raises(ValueError, match="lse must have the shape of x without its last axis"):
        run(lambda x, lse, spec: group_reduce(x, spec, axis_name=AXIS, op="lse", lse=lse[:1]))


def test_accumulate() -> None:
    with pytest.raises(ValueError, match=re.escape("accumulate must have shape (2, 3), but has (1, 3)")):
        run(lambda x, lse, spec: group_reduce(x, spec, axis_name=AXIS, accumulate=x[:1]))
    with pytest.raises(ValueError, match="accumulate must be a pytree like x"):
        run(lambda x, lse, spec: group_reduce(x, spec, axis_name=AXIS, accumulate=(x, x)))
    with pytest.raises(ValueError, match="accumulate is int32, which would cut off the sum of x in float32"):
        run(lambda x, lse, spec: group_reduce(x, spec, axis_name=AXIS, accumulate=x.astype(np.int32)))


def test_average_of_integers() -> None:
    with pytest.raises(ValueError, match="op='avg' needs floating-point arrays, but has int32"):
        run(lambda x, lse, spec: group_reduce(x.astype(np.int32), spec, axis_name=AXIS, op="avg"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"implementation": "ring"},
            "implementation must be one of ('native', 'nccl', 'xla', None), but it is",
        ),
        ({"num_sms": 0}, "num_sms must be between 1 and 132, but it is 0"),
        ({"num_sms": 133}, "num_sms must be between 1 and 132, but it is 133"),
        ({"num_sms": 8.0}, "num_sms must be an integer, but it is 8.0"),
        ({"ranks_per_host": 0}, "ranks_per_host must be between 1 and"),
        ({"ranks_per_host": "all"}, "ranks_per_host must be an integer, but it is 'all'"),
    ],
)
@pytest.mark.parametrize("function", [group_cast, group_reduce])
def test_options(function: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(lambda x, lse, spec: function(x, spec, axis_name=AXIS, **options))
