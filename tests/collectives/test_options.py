"""`CollectiveOptions`, and what rows lose that are rounded before they travel."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import CollectiveOptions, group_cast, group_reduce

from .groups import SEVERAL, Group, assert_close, assert_equal, on_groups
from .harness import AXIS, normal, on_ranks
from .routes import INPUT_ROWS, Transfer, random_transfer

CP = 8
NARROW = CollectiveOptions(wire_dtype=jnp.bfloat16)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)


def mapped(function: Any, **options: Any) -> Any:
    """A compiled function of arrays that lead with the ranks, and of a spec that all ranks have."""

    def local(arrays: Any, spec: Any) -> Any:
        results = function(*jax.tree.map(lambda leaf: leaf[0], arrays), spec)
        return jax.tree.map(lambda leaf: leaf[None], results)

    return jax.jit(on_ranks(local, CP, in_specs=(P(AXIS), P()), **options))


reduce_narrow = functools.partial(group_reduce, axis_name=AXIS, options=NARROW)


def test_equal_options_share_compilations() -> None:
    """However their values are written."""
    traces = 0

    @functools.partial(jax.jit, static_argnames="options")
    def count(x: jax.Array, options: CollectiveOptions) -> jax.Array:
        nonlocal traces
        traces += 1
        return x

    equal: list[Any] = [
        (8, jnp.bfloat16, 2),
        (np.int64(8), "bfloat16", np.float32(2)),
        (8, jnp.dtype(jnp.bfloat16), 2.0),
    ]
    for num_sms, wire_dtype, timeout in equal:
        options = CollectiveOptions(num_sms=num_sms, wire_dtype=wire_dtype, timeout=timeout)
        count(jnp.zeros(3), options=options)
    assert traces == 1
    count(jnp.zeros(3), options=CollectiveOptions(num_sms=8))
    assert traces == 2


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CollectiveOptions().num_sms = 3  # pyright: ignore[reportAttributeAccessIssue]


@on_groups(*SEVERAL)
def test_sums_of_rounded_rows(group: Group, rng: np.random.Generator) -> None:
    """They are added up in float32, and each is rounded once, as are rows of the gradient."""
    transfer = random_transfer(rng, group.size)
    y, own = normal(rng, group.size, transfer.spec.output_rows, 3), normal(rng, group.size, INPUT_ROWS, 3)
    options = dataclasses.replace(group.options, wire_dtype=jnp.bfloat16)

    def local(y: Any, own: Any, spec: Any) -> Any:
        reduce = functools.partial(group_reduce, spec=spec, axis_name=AXIS, options=options)
        sums, vjp = jax.vjp(reduce, y[0])
        results = sums, reduce(y[0], accumulate=own[0]), reduce(y[0], op="avg"), vjp(own[0])[0]
        return [x[None] for x in results]

    run = group.program(local, (P(AXIS), P(AXIS), P()))
    sums, more, mean, gradient = run(*group.shard((y, own)), group.replicate(transfer.spec))
    exact = transfer.reduce_sum(rounded(y))
    counts = np.maximum(transfer.counts(), 1)[..., None]
    wanted = [x.astype(np.float32) for x in (exact, own + exact, exact / counts)]
    assert_close((sums, more, mean), wanted, 1e-5)
    assert_equal(gradient, transfer.cast(rounded(own)).astype(np.float32))
    assert np.abs(rounded(y) - y).max() > 1e-3


def test_gradients_of_casts(rng: np.random.Generator) -> None:
    """Rows arrive as they are, their gradients rounded. Integers travel with them, under vmap too."""
    transfer = random_transfer(rng, CP)
    x, dy = normal(rng, CP, INPUT_ROWS, 3), normal(rng, CP, transfer.spec.output_rows, 3)
    numbers = rng.integers(9, size=(CP, INPUT_ROWS))

    def local(x: Any, numbers: Any, dy: Any, spec: Any) -> Any:
        def cast(x: jax.Array) -> Any:
            function = functools.partial(group_cast, spec=spec, axis_name=AXIS, options=NARROW)
            return jax.vmap(lambda x: function((x, numbers)), 1, 1)(x)

        (rows, copies), vjp = jax.vjp(cast, x)
        zeros = np.zeros(copies.shape, jax.dtypes.float0)
        return rows, copies, vjp((dy, zeros))[0]

    rows, copies, gradient = mapped(local)((x, numbers, dy), transfer.spec)
    np.testing.assert_array_equal(rows, transfer.cast(x))
    np.testing.assert_array_equal(copies[..., 0], transfer.cast(numbers))
    np.testing.assert_allclose(gradient, transfer.reduce_sum(rounded(dy)), rtol=1e-6, atol=1e-5)


def test_merges_of_rounded_outputs(rng: np.random.Generator) -> None:
    """The log-sum-exps are not rounded."""
    transfer = random_transfer(rng, CP)
    rows = transfer.spec.output_rows
    y, lse = normal(rng, CP, rows, 2, 4), 9 * normal(rng, CP, rows, 2)
    run = mapped(lambda y, lse, spec: reduce_narrow(y, spec, op="lse", lse=lse))
    got = run((y, lse), transfer.spec)
    for x, expected in zip(got, transfer.merge(rounded(y), lse), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(got[0] - transfer.merge(y, lse)[0]).max() > 1e-3


def check_rounding(got: Any, transfer: Transfer, y: np.ndarray, times: int) -> None:
    """Checks sums of y that have been rounded to bfloat16 on the way, this often at most and not never."""
    y = y.astype(np.float64)
    error, size = np.abs(got - transfer.reduce_sum(y)), transfer.reduce_sum(np.abs(y))
    assert (error <= 1.01 * times * 2.0**-8 * size).all()
    assert error.max() > 1e-3


def test_hosts_round_twice(rng: np.random.Generator) -> None:
    """Sums of a host cross in the wire dtype."""
    transfer = random_transfer(rng, CP)
    y, spec = normal(rng, CP, transfer.spec.output_rows, 3), transfer.spec.by_host(4)
    run = mapped(reduce_narrow)
    once, twice = run((y,), transfer.spec), run((y,), spec)
    check_rounding(once, transfer, y, 1)
    check_rounding(twice, transfer, y, 2)
    assert np.abs(once - twice).max() > 1e-3
    text = run.lower((y,), spec).as_text()
    exchanged = re.findall(r'"stablehlo.all_to_all".*-> tensor<(?:\d+x)+(\w+)>', text)
    assert exchanged == ["bf16", "bf16"]


def test_doubles_that_travel_as_floats(x64: None, rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, CP)
    y = normal(rng, CP, transfer.spec.output_rows, 3, dtype=np.float64)
    run = mapped(lambda y, spec: group_reduce(y, spec, axis_name=AXIS, options=options))
    options = CollectiveOptions(wire_dtype=np.float32)
    got, want = run((y,), transfer.spec), transfer.reduce_sum(y)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    assert np.abs(got - want).max() > 1e-9
