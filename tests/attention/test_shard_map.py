"""Meshes: inside shard_map, and outside under Explicit and Auto axes."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxmagi import masks
from jaxmagi.attention import attention
from jaxmagi.masks import AttnMask
from tests.cases import FP32_TOLERANCE

from .helpers import attend, gradients, make_inputs, max_error

LENGTH = 40
MODES = pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
SHARED = masks.documents([25, 15])
PER_EXAMPLE = AttnMask.stack([SHARED, masks.causal(LENGTH), masks.full(LENGTH), SHARED])


def make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type, axis_type))


def operands(rng: np.random.Generator) -> Any:
    x = make_inputs(rng, batch=(4,), q_len=LENGTH, kv_len=LENGTH, dim=8, v_dim=8)
    return x.query, x.key, x.value, x.sinks


def place(mesh: Mesh, args: tuple[Any, ...], *specs: P) -> Any:
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True))


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert max_error(a, b) <= FP32_TOLERANCE * max(1.0, float(np.abs(b).max()))


@pytest.fixture
def wanted(rng: np.random.Generator) -> Any:
    """Operands, and gradients and results on one device."""
    args = operands(rng)

    def run(mask: AttnMask, implementation: str) -> Any:
        return gradients(functools.partial(attend, mask=mask, implementation=implementation))(*args)

    return args, run


@MODES
@pytest.mark.parametrize(
    "mask, manual", [(SHARED, {"data", "tensor"}), (PER_EXAMPLE, {"data"})], ids=["all", "data"]
)
def test_inside_shard_map(
    wanted: Any, implementation: str, axis_type: AxisType, mask: AttnMask, manual: set[str]
) -> None:
    """All axes or one are manual, with check_vma; sinks and a shared mask are the same along "data"."""
    args, want = wanted
    mesh = make_mesh(axis_type)
    heads = "tensor" if "tensor" in manual else None
    rows, bands = P("data", None, heads), P("data") if mask is PER_EXAMPLE else P()

    def body(query: Any, key: Any, value: Any, sinks: Any, bands: Any) -> Any:
        local = AttnMask(bands, LENGTH, LENGTH)
        return attend(query, key, value, sinks, mask=local, implementation=implementation)

    specs = (rows, rows, rows, P(heads), bands)
    mapped: Any = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=rows, axis_names=manual, check_vma=True
    )
    placed = place(mesh, args, *[P("data", None, "tensor")] * 3, P("tensor"))
    (placed_bands,) = place(mesh, (mask.bands,), bands)
    with jax.set_mesh(mesh):
        got = gradients(lambda *operands: mapped(*operands, placed_bands))(*placed)
    assert_same(got, want(mask, implementation))


def test_explicit_mesh_without_context(rng: np.random.Generator, implementation: str) -> None:
    """Operands that live on a mesh, without jax.set_mesh and without jit; key and value on every device."""
    mesh = make_mesh(AxisType.Explicit)
    query, key, value, _ = operands(rng)
    op = functools.partial(attention, mask=SHARED, implementation=implementation)
    out = op(*place(mesh, (query, key, value), P("data", None, "tensor"), P(), P()))
    assert jax.typeof(out).sharding.spec == P("data", None, "tensor", None)
    assert max_error(out, op(query, key, value)) <= FP32_TOLERANCE


@pytest.mark.parametrize(
    ("batch", "query_axis"), [((), 0), ((2,), 0), ((), None)], ids=["tokens", "batch", "shared_query"]
)
def test_vmap_over_a_sharded_axis(
    rng: np.random.Generator, implementation: str, batch: tuple[int, ...], query_axis: int | None
) -> None:
    """The mapped axis becomes batch, and stays sharded."""
    mesh = make_mesh(AxisType.Explicit)
    x = make_inputs(rng, batch=(4, *batch), q_len=LENGTH, kv_len=LENGTH, dim=8, v_dim=8)[:4]
    rows = P("data") if query_axis == 0 else P()
    x = x if query_axis == 0 else (x[0][0], *x[1:])
    function = functools.partial(attend, mask=SHARED, implementation=implementation)
    mapped = jax.vmap(function, in_axes=(query_axis, 0, 0, None))
    want = gradients(mapped)(*x)
    placed = place(mesh, x, rows, P("data"), P("data"), P())
    with jax.set_mesh(mesh):
        compiled = gradients(mapped).lower(*placed).compile()
        assert "all-gather" not in compiled.as_text()
        got = compiled(*placed)
    assert_same(got, want)


@pytest.mark.parametrize(
    "specs, message",
    [
        ([P(None, None, None, "tensor")] * 3, r"query is sharded in its head dimension over 'tensor'"),
        (
            [P("data"), P("tensor"), P("data")],
            r"key has its batch sharded over 'tensor', but query over 'data'",
        ),
        (
            [P(), P("data"), P("tensor")],
            r"value has its batch sharded over 'tensor', but key over 'data'",
        ),
        (
            [P("tensor"), P(None, None, "tensor"), P()],
            r"output would be sharded over a mesh axis twice, .*'tensor', None, 'tensor'",
        ),
    ],
)
def test_shardings_that_cannot_work(rng: np.random.Generator, specs: list[P], message: str) -> None:
    mesh = make_mesh(AxisType.Explicit)
    *args, _ = operands(rng)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        query, key, value = place(mesh, tuple(args), *specs)
        attention(query, key, value, SHARED)


@pytest.mark.parametrize(
    "rows", [P("data", None, "tensor"), P("data"), P(None, None, "tensor")], ids=["both", "batch", "heads"]
)
def test_only_keys_are_sharded(wanted: Any, implementation: str, rows: P) -> None:
    """Query and sinks are whole on every device; so are their gradients."""
    args, want = wanted
    mesh = make_mesh(AxisType.Explicit)
    placed = place(mesh, args, P(), rows, rows, P())
    with jax.set_mesh(mesh):
        grads, (out, lse) = gradients(
            functools.partial(attend, mask=PER_EXAMPLE, implementation=implementation)
        )(*placed)
    assert_same((grads, (out, lse)), want(PER_EXAMPLE, implementation))
    assert jax.typeof(out).sharding.spec == P(*rows, *[None] * (4 - len(rows)))
    for gradient, operand in zip(grads, placed, strict=True):
        assert jax.typeof(gradient).sharding.spec == jax.typeof(operand).sharding.spec


@pytest.mark.parametrize("rows", [None, P("data", None, "tensor")], ids=["one", "explicit"])
def test_second_call_outside_jit_compiles_nothing(
    rng: np.random.Generator, implementation: str, compilations: list[str], rows: P | None
) -> None:
    mesh = make_mesh(AxisType.Explicit)
    *args, sinks = operands(rng)
    placed = args if rows is None else place(mesh, tuple(args), *[rows] * 3)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, SHARED, sinks=sinks, implementation=implementation).sum()

    with jax.set_mesh(mesh):
        for function in (loss, jax.grad(loss, argnums=(0, 1, 2))):
            function(*placed)
            compilations.clear()
            function(*placed)
            assert not compilations
