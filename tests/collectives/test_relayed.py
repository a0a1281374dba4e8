"""Transfers in two steps against the same in one: rows, sums, means, merges, and their derivatives."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import CollectiveOptions, GroupCastSpec, PlanCapacity, RelayedSpec, group_cast, group_reduce

from ..compiled import collectives
from .groups import Group
from .harness import AXIS, cast_function, normal, on_ranks, reduce_function
from .routes import INPUT_ROWS, random_transfer
from .test_gpu_patterns import check_patterns

CP = 8


def relayed(spec: GroupCastSpec, ranks_per_host: int) -> RelayedSpec:
    """A relayed spec of one size for all specs by `random_transfer`, to share compilations."""
    most = spec.pair_rows
    return spec.by_host(ranks_per_host).padded(
        copies=512,
        output_rows=spec.output_rows,
        pair_rows=8 * most,
        across=PlanCapacity(0, 256, most, 8 * most),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "group", [Group(None, 4, ranks_per_host=n) for n in (1, 2, 4)], ids=str, indirect=True
)
def test_random_transfers(group: Group) -> None:
    """Arrays of all kinds, as in one step."""
    ranks_per_host = group.ranks_per_host
    assert ranks_per_host is not None
    check_patterns(group, rounds=40, spec_of=lambda spec: relayed(spec, ranks_per_host))


@functools.cache
def cast_and_transpose() -> Any:
    """Compiled: x, spec in parts, cotangents → rows, gradient of x."""

    def local(x: Any, spec: Any, cotangents: Any) -> Any:
        rows, vjp = jax.vjp(lambda x: group_cast(x, spec, axis_name=AXIS), x[0])
        return rows[None], vjp(cotangents[0])[0][None]

    return jax.jit(on_ranks(local, CP))


@pytest.mark.parametrize("ranks_per_host", [1, 2, 8])
def test_rows_sent_twice_to_a_rank(ranks_per_host: int, rng: np.random.Generator) -> None:
    for _ in range(3):
        transfer = random_transfer(rng, CP, repeats=True)
        x = normal(rng, CP, INPUT_ROWS, 3)
        rows = cast_function(CP)(x, relayed(transfer.spec, ranks_per_host))
        np.testing.assert_array_equal(rows, transfer.cast(x))


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4, 8])
def test_casts_to_the_bit(ranks_per_host: int, rng: np.random.Generator) -> None:
    """Zeros and NaNs keep their signs, and all dtypes are moved alike."""
    transfer = random_transfer(rng, CP)
    floats = normal(rng, CP, INPUT_ROWS, 3)
    floats[rng.random(floats.shape) < 0.3] = -0.0
    floats[rng.random(floats.shape) < 0.3] = np.array(0xFFC00000, np.uint32).view(np.float32)
    x = {
        "single": floats,
        "short": np.asarray(floats.view(np.uint32) >> 16, np.uint16).view(jnp.bfloat16),
        "bytes": rng.integers(-128, 128, floats.shape, np.int8),
        "flags": rng.random(floats.shape) < 0.5,
    }
    rows = cast_function(CP)(x, relayed(transfer.spec, ranks_per_host))
    for name, got in rows.items():
        assert got.dtype == x[name].dtype
        assert np.asarray(got).tobytes() == transfer.cast(x[name]).tobytes()


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_sums_of_integers(dtype: Any, rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, CP)
    y = rng.integers(-4, 5, (CP, transfer.spec.output_rows, 3), dtype)
    sums = reduce_function(CP)(y, relayed(transfer.spec, 4), None, None)
    np.testing.assert_array_equal(sums, transfer.reduce_sum(y))


@pytest.mark.parametrize("is_shared", [True, False])
def test_vmap(is_shared: bool, rng: np.random.Generator) -> None:
    """A batch has one spec, or one for each example. Gradients are those of the examples alone."""
    transfers = [random_transfer(rng, CP) for _ in range(2)]
    if is_shared:
        transfers = transfers[:1] * 2
    specs = [relayed(transfer.spec, 4) for transfer in transfers]
    spec = specs[0] if is_shared else jax.tree.map(lambda *tables: np.stack(tables), *specs)
    x, dy = normal(rng, 2, CP, INPUT_ROWS, 3), normal(rng, 2, CP, transfers[0].spec.output_rows, 3)
    batched = jax.jit(jax.vmap(cast_and_transpose(), (0, None if is_shared else 0, 0)))
    for i, (rows, gradient) in enumerate(zip(*batched(x, spec, dy), strict=True)):
        np.testing.assert_array_equal(rows, transfers[i].cast(x[i]))
        np.testing.assert_array_equal(gradient, cast_and_transpose()(x[i], specs[i], dy[i])[1])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_heads_sharded_over_an_axis_that_is_left_out(kind: AxisType, rng: np.random.Generator) -> None:
    """Ranks exchange their parts of the rows, and gather nothing."""
    transfer = random_transfer(rng, 4)
    x, y = normal(rng, 4, INPUT_ROWS, 2, 3), normal(rng, 4, transfer.spec.output_rows, 2, 3)
    spec = transfer.spec.by_host(2)

    def local(x: Any, y: Any) -> Any:
        rows, pull = jax.vjp(lambda x: group_cast(x, spec, axis_name=AXIS), x[0])
        return [z[None] for z in (rows, *pull(y[0]), group_reduce(y[0], spec, axis_name=AXIS))]

    mesh = jax.make_mesh((2, 4), ("tensor", AXIS), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, P(AXIS, None, "tensor"))
        mapped = jax.shard_map(local, in_specs=P(AXIS), out_specs=P(AXIS), axis_names={AXIS})
        compiled = jax.jit(mapped).lower(*jax.device_put((x, y), place)).compile()
        rows, gradient, sums = compiled(*jax.device_put((x, y), place))
    np.testing.assert_array_equal(rows, transfer.cast(x))
    for got in (gradient, sums):
        np.testing.assert_allclose(got, transfer.reduce_sum(y), rtol=1e-5, atol=1e-5)
    assert all(name.startswith("all-to-all") for name in collectives(compiled.as_text()))


def test_casts_and_their_gradients(rng: np.random.Generator) -> None:
    """Rows to the bit, sums up to the order of additions; with sharded tables."""
    for _ in range(3):
        transfer = random_transfer(rng, CP)
        spec = relayed(transfer.spec, 4)
        x, dy = normal(rng, CP, INPUT_ROWS, 3), normal(rng, CP, transfer.spec.output_rows, 3)
        rows, gradient = cast_and_transpose()(x, spec, dy)
        np.testing.assert_array_equal(rows, transfer.cast(x))
        np.testing.assert_allclose(gradient, transfer.reduce_sum(dy), rtol=1e-5, atol=1e-5)


def test_sums_and_means_of_half_precision_are_rounded_once(rng: np.random.Generator) -> None:
    """Sums cross between hosts in float32. Their gradient is the cast."""
    transfer = random_transfer(rng, CP)
    y = normal(rng, CP, transfer.spec.output_rows, 3, dtype=jnp.bfloat16)
    dx = normal(rng, CP, INPUT_ROWS, 3, dtype=jnp.bfloat16)

    def local(y: Any, spec: Any, dx: Any) -> Any:
        sums, vjp = jax.vjp(lambda y: group_reduce(y, spec, axis_name=AXIS), y[0])
        mean = group_reduce(y[0], spec, axis_name=AXIS, op="avg")
        return sums[None], mean[None], vjp(dx[0])[0][None]

    mapped = on_ranks(local, CP, in_specs=(P(AXIS), P(), P(AXIS)))
    sums, mean, gradient = jax.jit(mapped)(y, relayed(transfer.spec, 4), dx)
    np.testing.assert_array_equal(gradient, transfer.cast(dx))
    exact = transfer.reduce_sum(y.astype(np.float64))
    size = transfer.reduce_sum(np.abs(y.astype(np.float64)))
    counts = np.maximum(transfer.counts(), 1)[..., None]
    for got, want in ((sums, exact), (mean, exact / counts)):
        assert got.dtype == jnp.bfloat16
        error = np.abs(np.asarray(got).astype(np.float64) - want)
        assert (error <= 2.0**-8 * np.abs(want) + 1e-6 * size).all()


def test_merges_and_their_gradients(x64: None, rng: np.random.Generator) -> None:
    """Against a merge of all parts in one place. Masked parts hold NaN."""
    transfer = random_transfer(rng, 4)
    rows = transfer.spec.output_rows
    y, lse = normal(rng, 4, rows, 2, 4, dtype=np.float64), normal(rng, 4, rows, 2, dtype=np.float64)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    y[np.isneginf(lse)] = np.nan
    own = normal(rng, 4, INPUT_ROWS, 2, 4, dtype=np.float64), normal(rng, 4, INPUT_ROWS, 2, dtype=np.float64)
    operands = (y, lse, own)

    def in_two_steps(operands: Any) -> Any:
        def local(operands: Any) -> Any:
            y, lse, own = jax.tree.map(lambda leaf: leaf[0], operands)
            spec = transfer.spec.by_host(2)
            merged = group_reduce(y, spec, axis_name=AXIS, op="lse", lse=lse, accumulate=own)
            return jax.tree.map(lambda leaf: leaf[None], merged)

        return on_ranks(local, 4)(operands)

    def in_one_place(operands: Any) -> Any:
        y, lse, (out, own_lse) = operands
        numbers = transfer.source_numbers().reshape(-1)
        share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse)).reshape(-1, 2, 1)
        weighted = share * jnp.where(jnp.isneginf(lse)[..., None], 0, y).reshape(-1, 2, 4)
        place = jnp.where(numbers < 0, 4 * INPUT_ROWS, numbers)
        start = jnp.exp(own_lse).reshape(-1, 2, 1)
        total = start.at[place].add(share, mode="drop")
        merged = (start * out.reshape(-1, 2, 4)).at[place].add(weighted, mode="drop") / total
        return merged.reshape(out.shape), jnp.log(total).reshape(own_lse.shape)

    def loss(merge: Any, operands: Any) -> Any:
        out, total = merge(operands)
        return (jnp.sin(out) * total[..., None]).sum(), (out, total)

    given, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, merge), has_aux=True))(operands)
        for merge in (in_two_steps, in_one_place)
    )
    for ours, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_rows_inside_hosts_are_exchanged_inside_hosts(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 4)
    mapped = on_ranks(lambda x: group_cast(x, transfer.spec.by_host(2), axis_name=AXIS), 4)
    text = jax.jit(mapped).lower(np.zeros((4 * INPUT_ROWS, 3), np.float32)).as_text()
    assert re.findall(r"all_to_all.* split_count = (\d+)", text) == ["4", "2"]
    assert "[[0, 1], [2, 3]]" in text


SPEC = GroupCastSpec.from_splits([[2]] * 4, [[[1]], [[2]], [[3]], [[0]]], [[2]] * 4, [[3], [0], [1], [2]])


@pytest.mark.parametrize(
    ("cp_size", "options", "error", "message"),
    [
        (4, {"ranks_per_host": 4}, ValueError, "ranks_per_host=4, but the spec is for hosts of 2 ranks"),
        (3, {}, ValueError, "for hosts of 2 ranks, but mesh axis 'context' has size 3"),
        (2, {}, ValueError, "the spec is for 4 ranks, but mesh axis 'context' has size 2"),
        (4, {"implementation": "native"}, NotImplementedError, "brings rows across hosts: use None"),
    ],
)
@pytest.mark.parametrize("function", [group_cast, group_reduce])
def test_errors(
    function: Any, cp_size: int, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    chosen = CollectiveOptions(**options)
    mapped = on_ranks(lambda x: function(x, SPEC.by_host(2), axis_name=AXIS, options=chosen), cp_size)
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(mapped, np.zeros((2 * cp_size, 3), np.float32))


def test_stacked_spec() -> None:
    stacked = jax.tree.map(lambda table: table[None], SPEC.by_host(2))
    mapped = on_ranks(lambda x: group_cast(x, stacked, axis_name=AXIS), 4)
    with pytest.raises(
        ValueError, match=r"spec.across.sends must be \[cp, M, 5\], but has shape .*: use jax.vmap"
    ):
        jax.eval_shape(mapped, np.zeros((8, 3), np.float32))
