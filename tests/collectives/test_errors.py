"""Wrong arguments raise errors that say what is wrong."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import CollectiveOptions, GroupCastSpec, group_cast, group_reduce

from .harness import AXIS, on_ranks

SPEC = GroupCastSpec.from_splits([[2], [2]], [[[1]], [[0]]], [[2], [2]], [[1], [0]])
X = np.zeros((4, 3), np.float32)
LSE = np.zeros(4, np.float32)


def run(function: Callable[..., Any], *, cp_size: int = 2, spec: Any = SPEC, check_vma: bool = True) -> Any:
    mapped = on_ranks(lambda x, lse: function(x, lse, spec), cp_size, check_vma=check_vma)
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


def test_no_spec_or_many() -> None:
    with pytest.raises(ValueError, match=re.escape("spec must be a jaxmagi.GroupCastSpec, but it is tuple")):
        run(cast, spec=())
    stacked = jax.tree.map(lambda table: table[None], SPEC)
    with pytest.raises(ValueError, match=r"sends must be \[cp, M, 5\], but has shape .*: use jax.vmap"):
        run(cast, spec=stacked)
    narrow = dataclasses.replace(SPEC, sends=SPEC.sends[..., :4])
    with pytest.raises(ValueError, match=r"spec.sends must be \[cp, M, 5\], but has shape \(2, \d+, 4\)\."):
        run(cast, spec=narrow)


def reduce(x: Any, spec: Any, **options: Any) -> Any:
    return group_reduce(x, spec, axis_name=AXIS, **options)


LSE_MESSAGE = "lse goes with op='lse' and only with it, but"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, lse, spec: group_cast(x[:1], spec, axis_name=AXIS),
            "x must have 2 rows on each rank, as its spec, but has shape (1, 3)",
        ),
        (
            lambda x, lse, spec: reduce(x[:1], spec),
            "x must have 2 rows on each rank, as its spec, but has shape (1, 3)",
        ),
        (
            lambda x, lse, spec: reduce(x, spec, op="max"),
            "op must be one of ('sum', 'avg', 'lse'), but it is 'max'",
        ),
        (lambda x, lse, spec: reduce(x, spec, op="lse"), f"{LSE_MESSAGE} op='lse' and lse is None"),
        (lambda x, lse, spec: reduce(x, spec, lse=lse), f"{LSE_MESSAGE} op='sum' and lse is an"),
        (
            lambda x, lse, spec: reduce(x, spec, op="lse", lse=lse),
            "op='lse' needs x [rows, N, D] and lse [rows, N], but they are (2, 3) and (2,)",
        ),
        (
            lambda x, lse, spec: reduce(x[:, None], spec, op="lse", lse=lse),
            "op='lse' needs x [rows, N, D] and lse [rows, N], but they are (2, 1, 3) and (2,)",
        ),
        (
            lambda x, lse, spec: reduce(x, spec, accumulate=x[:1]),
            "accumulate must have shape (2, 3), but has (1, 3)",
        ),
        (lambda x, lse, spec: reduce(x, spec, accumulate=(x, x)), "accumulate must be a pytree like x"),
        (
            lambda x, lse, spec: reduce(x, spec, accumulate=x.astype(np.int32)),
            "accumulate is int32, which would cut off the sum of x in float32",
        ),
        (
            lambda x, lse, spec: reduce(x.astype(np.int32), spec, op="avg"),
            "op='avg' needs floating-point arrays, but has int32",
        ),
        (
            lambda x, lse, spec: reduce(x[:, None].astype(np.int32), spec, op="lse", lse=lse[:, None]),
            "op='lse' needs floating-point arrays, but x is int32",
        ),
        (
            lambda x, lse, spec: reduce(x[:, None], spec, op="lse", lse=lse[:, None].astype(np.int32)),
            "op='lse' needs floating-point arrays, but lse is int32",
        ),
    ],
)
def test_operands(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(call)


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
        ({"wire_dtype": "fp8"}, "wire_dtype must be a dtype, but it is 'fp8'"),
        (
            {"wire_dtype": jnp.float8_e4m3fn},
            "must be one of ('float64', 'float32', 'bfloat16', 'float16'), but it is 'float8_e4m3fn'",
        ),
        ({"wire_dtype": np.int8}, "but it is 'int8'"),
        ({"timeout": 0}, "timeout must be between 0.001 and 1000000 seconds, but it is 0"),
        ({"timeout": 2, "implementation": "xla"}, 'timeout=2.0, but implementation="xla" has no time limit'),
    ],
)
def test_options_that_there_are_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CollectiveOptions(**options)


NARROW = CollectiveOptions(wire_dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (
            np.float32,
            {"implementation": "xla"},
            "options must be a jaxmagi.CollectiveOptions, but it is dict",
        ),
        (np.float32, CollectiveOptions(wire_dtype="float64"), "wire_dtype=float64, but {} float32: floating"),
        (
            jnp.bfloat16,
            CollectiveOptions(wire_dtype="float32"),
            "wire_dtype=float32, but {} bfloat16: floating",
        ),
        (np.float16, NARROW, "wire_dtype=bfloat16, but {} float16: floating"),
        (np.complex64, NARROW, "wire_dtype=bfloat16, but {} complex64: floating"),
    ],
)
@pytest.mark.parametrize(
    ("function", "what"),
    [(group_cast, "the gradient of x is"), (group_reduce, "x is")],
    ids=["cast", "reduce"],
)
def test_options_that_do_not_fit(function: Any, what: str, dtype: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message.format(what))):
        run(lambda x, lse, spec: function(x.astype(dtype), spec, axis_name=AXIS, options=options))


@pytest.mark.parametrize("function", [group_cast, group_reduce])
def test_hosts_and_masked_arrays(function: Any) -> None:
    uneven = CollectiveOptions(ranks_per_host=3)
    with pytest.raises(ValueError, match="ranks_per_host=3 must divide the size 4 of mesh axis 'context'"):
        run(lambda x, lse, spec: function(x, spec, axis_name=AXIS, options=uneven), cp_size=4)
    with pytest.raises(ValueError, match="x must not be a masked array"):
        run(lambda x, lse, spec: function([x, np.ma.zeros((2, 3))], spec, axis_name=AXIS))


def test_wire_dtype_and_integers() -> None:
    """They may be cast, as they have no gradient, but not be added up after rounding."""
    run(lambda x, lse, spec: group_cast([x, x.astype(int)], spec, axis_name=AXIS, options=NARROW)[0])
    with pytest.raises(ValueError, match="wire_dtype=bfloat16, but x is int32"):
        run(lambda x, lse, spec: group_reduce(x.astype(np.int32), spec, axis_name=AXIS, options=NARROW))
