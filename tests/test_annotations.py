"""Checks the jaxtyping annotations of public functions with beartype.

Outside of tests nothing checks annotations, and wrong shapes get the ValueErrors of the functions themselves.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from beartype.door import is_bearable
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError, jaxtyped

import jaxmagi
from jaxmagi import AttnMask, CollectiveOptions, GroupCastSpec, masks, plan_context

from .context.harness import AXIS, make_mesh

LENGTH, RANKS = 16, 2
MASK = masks.causal(LENGTH)
PLAN = plan_context(MASK, RANKS)
OPTIONS = CollectiveOptions(implementation="xla", wire_dtype=jnp.bfloat16)
SPEC = GroupCastSpec.from_splits([[3], [2]], [[[1]], [[0]]], [[2], [3]], [[1], [0]])


def checked(function: Any) -> Any:
    return jaxtyped(function, typechecker=beartype)


def rows(*batch: int, length: int = LENGTH, heads: int = 4, dim: int = 8) -> jax.Array:
    return jnp.ones((*batch, length, heads, dim))


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("place", [jnp.asarray, np.asarray])
def test_attention(batch: tuple[int, ...], place: Callable[..., Any]) -> None:
    """Operands may be numpy arrays, jax arrays or tracers."""
    attend = checked(jaxmagi.attention)
    query, key, value = map(place, (rows(*batch), rows(*batch, heads=2), rows(*batch, heads=2, dim=6)))
    out, lse = attend(query, key, value, MASK, sinks=place(jnp.zeros(4)), return_residual=True)
    assert (out.shape, lse.shape) == ((*batch, LENGTH, 4, 6), (*batch, LENGTH, 4))
    jax.eval_shape(jax.grad(lambda query: attend(query, key, value, MASK).sum()), query)
    jax.eval_shape(jax.vmap(lambda query: attend(query, key, value, MASK)), query[None])


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_attention_fn(batch: tuple[int, ...]) -> None:
    x = rows(*batch)
    assert checked(jaxmagi.nn.attention_fn)(x, x, x, mask=MASK).shape == x.shape


def test_context_attention() -> None:
    x = jax.jit(lambda x: checked(jaxmagi.dispatch)(x, PLAN))(rows())
    with jax.set_mesh(make_mesh(RANKS)):
        out = checked(jaxmagi.context_attention)(x, x, x, PLAN, axis_name=AXIS, collectives=OPTIONS)
    out = checked(jaxmagi.undispatch)(np.asarray(out), PLAN)
    assert isinstance(out, np.ndarray) and out.shape == (LENGTH, 4, 8)


def test_group_collectives() -> None:
    def there_and_back(x: jax.Array) -> Any:
        options = {"axis_name": AXIS, "options": OPTIONS}
        received = checked(jaxmagi.group_cast)({"x": x}, SPEC, **options)
        return checked(jaxmagi.group_reduce)(received, SPEC, accumulate={"x": x}, **options)

    mapped = jax.shard_map(there_and_back, mesh=make_mesh(RANKS), in_specs=P(AXIS), out_specs=P(AXIS))
    assert mapped(jnp.ones((2 * SPEC.input_rows, 4)))["x"].shape == (2 * SPEC.input_rows, 4)


def test_options() -> None:
    hints = get_type_hints(CollectiveOptions)
    for given in (None, "bfloat16", jnp.bfloat16, np.float32, jnp.dtype(jnp.bfloat16)):
        assert is_bearable(given, hints["wire_dtype"])
        assert is_bearable(CollectiveOptions(wire_dtype=given).wire_dtype, hints["wire_dtype"])
    assert is_bearable(CollectiveOptions(timeout=2).timeout, float)


def test_masks() -> None:
    lengths = np.array([3, 5])
    for build in (masks.documents, masks.from_segment_ids):
        for given in (lengths, lengths.tolist(), jnp.asarray(lengths)):
            mask = checked(build)(given)
            for bands in (mask.bands, jnp.asarray(mask.bands), AttnMask.stack([mask]).bands):
                assert is_bearable(bands, AttnMask.__annotations__["bands"])
    assert not is_bearable(np.zeros((8, 5), np.int32), AttnMask.__annotations__["bands"])
    assert checked(jaxmagi.flops)(MASK, 4, 8) > 0


WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "head dimension": (jaxmagi.attention, (rows(), rows(dim=4), rows(), MASK), {}),
    "number of keys": (jaxmagi.attention, (rows(), rows(), rows(length=8), MASK), {}),
    "batch": (jaxmagi.attention, (rows(2), rows(3), rows(3), MASK), {}),
    "dtype": (jaxmagi.attention, (*[rows().astype(int)] * 3, MASK), {}),
    "mask": (jaxmagi.attention, (rows(), rows(), rows(), np.ones((LENGTH, LENGTH), bool)), {}),
    "sinks": (jaxmagi.attention, (rows(), rows(), rows(), MASK), {"sinks": jnp.zeros(3)}),
    "attention_fn": (jaxmagi.nn.attention_fn, (rows(), rows(dim=4), rows()), {}),
    "margin": (jaxmagi.attention, (rows(), rows(), rows(), MASK), {"sm_margin": 0.5}),
    "collectives": (
        jaxmagi.context_attention,
        (rows(), rows(), rows(), PLAN),
        {"axis_name": AXIS, "collectives": "nccl"},
    ),
    "options": (jaxmagi.group_cast, (rows(), SPEC), {"axis_name": AXIS, "options": "nccl"}),
    "plan": (jaxmagi.dispatch, (rows(), MASK), {}),
    "lengths": (masks.documents, (np.ones((2, 2), int),), {}),
    "segments": (masks.from_segment_ids, (np.ones(4),), {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    """The annotations reject the arguments with beartype, and the functions do without."""
    function, arguments, options = WRONG[case]
    with pytest.raises(TypeCheckError):
        checked(function)(*arguments, **options)
    with pytest.raises(ValueError):
        function(*arguments, **options)
