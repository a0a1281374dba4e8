"""group_cast against a row-by-row simulation."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import GroupCastSpec, group_cast

from ..planning.oracle import check_spec
from .harness import AXIS, cast_function, normal, on_ranks
from .routes import INPUT_ROWS, random_transfer


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_random_specs(cp_size: int, rng: np.random.Generator) -> None:
    cast = cast_function(cp_size)
    cast.clear_cache()  # of other tests
    for i in range(20):
        transfer = random_transfer(rng, cp_size, repeats=i % 2 == 0, room_for_repeats=True)
        x = normal(rng, cp_size, INPUT_ROWS, 3)
        np.testing.assert_array_equal(cast(x, transfer.spec), transfer.cast(x))
    assert cast._cache_size() == 1


@pytest.mark.parametrize("cp_size", [1, 3, 8])
def test_sends_alone_say_where_rows_go(cp_size: int, rng: np.random.Generator) -> None:
    for _ in range(20):
        transfer = random_transfer(rng, cp_size)
        check_spec(transfer.spec)
        x = normal(rng, cp_size, INPUT_ROWS, 3)
        out = np.zeros((cp_size, transfer.spec.output_rows, 3), np.float32)
        for rank, table in enumerate(transfer.spec.sends):
            for dst, _, row, length, dst_row in table:
                out[dst, dst_row : dst_row + length] = x[rank, row : row + length]
        np.testing.assert_array_equal(out, transfer.cast(x))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec_sharded", [True, False])
def test_spec_whole_or_sharded(spec_sharded: bool, check_vma: bool, rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 4)
    x = normal(rng, 4, INPUT_ROWS, 3)
    cast = cast_function(4, spec_sharded=spec_sharded, check_vma=check_vma)
    np.testing.assert_array_equal(cast(x, transfer.spec), transfer.cast(x))


def test_closed_over_spec_and_replicated_rows(rng: np.random.Generator) -> None:
    """A spec in numpy, and rows that all ranks share: the result varies over the axis all the same."""
    transfer = random_transfer(rng, 4)
    x = normal(rng, INPUT_ROWS, 3)
    mapped = on_ranks(lambda x: group_cast(x, transfer.spec, axis_name=AXIS), 4, in_specs=P())
    expected = transfer.cast(np.broadcast_to(x, (4, *x.shape)))
    np.testing.assert_array_equal(jax.jit(mapped)(x), expected.reshape(-1, 3))
    # The gradient of what the ranks share is the sum of theirs.
    gradient = jax.jit(jax.grad(lambda x: mapped(x).sum()))(x)
    np.testing.assert_array_equal(gradient[:, 0], transfer.counts().sum(0))


def test_keys_and_values_share_a_collective(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 3)
    x = (normal(rng, 3, INPUT_ROWS, 2, 4), normal(rng, 3, INPUT_ROWS, 2, 5))
    assert cast_function(3).lower(x, transfer.spec).as_text().count("all_to_all") == 1


def test_nothing_to_send() -> None:
    spec = GroupCastSpec.from_splits([[], []], [[], []], [[], []], [[], []])
    assert (spec.input_rows, spec.output_rows) == (0, 0)
    assert cast_function(2)(np.zeros((2, 0, 3), np.float32), spec).shape == (2, 0, 3)


def test_nan_stays_where_it_is_sent(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 4)
    x = normal(rng, 4, INPUT_ROWS, 3)
    x[transfer.counts() == 0] = np.nan
    out = cast_function(4)(x, transfer.spec)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_axis_of_a_larger_mesh(kind: AxisType, rng: np.random.Generator) -> None:
    """Every row of the mesh exchanges within itself, in partial and in full manual mode."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(kind, kind))
    transfer = random_transfer(rng, 4)
    x = normal(rng, 2, 4, INPUT_ROWS, 3)
    expected = np.stack([transfer.cast(one) for one in x])

    def full(x: jax.Array) -> jax.Array:
        return group_cast(x[0, 0], transfer.spec, axis_name=AXIS)[None, None]

    def partial(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda one: group_cast(one, transfer.spec, axis_name=AXIS))(x[:, 0])[:, None]

    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("data", AXIS)))
        for function, spec, axes in (
            (full, P("data", AXIS), {"data", AXIS}),
            (partial, P(None, AXIS), {AXIS}),
        ):
            mapped = jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names=axes)
            np.testing.assert_array_equal(jax.jit(mapped)(x), expected)


def test_without_jit(rng: np.random.Generator) -> None:
    transfer = random_transfer(rng, 2)
    x = normal(rng, 2 * INPUT_ROWS, 3)
    mapped = on_ranks(lambda x: group_cast(x, transfer.spec, axis_name=AXIS), 2)
    np.testing.assert_array_equal(mapped(x), transfer.cast(x.reshape(2, -1, 3)).reshape(-1, 3))
