"""Values, gradients and transformations of products with a collective, against plain lax."""

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import export
from jax.sharding import AxisType, PartitionSpec as P
from jax.test_util import check_grads

from jaxmagi import CollectiveOptions, matmul_reduce_scatter
from jaxmagi.overlap import _choice

from .harness import AXIS, PRODUCTS, Function, Product, mesh_of, normal, on_mesh

EACH = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
BF16_ULP = 2.0**-8


def operands(
    size: int, *batch: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Returns whole operands whose sizes all axes of so many ranks divide."""
    return normal(0, *batch, 6 * size, 4 * size, dtype=dtype), normal(1, 4 * size, 3 * size, dtype=dtype)


def sine_of(run: Function) -> Function:
    """Returns a loss whose cotangents differ from place to place."""
    return lambda *args: jnp.sin(run(*args)).sum()


@EACH
@pytest.mark.parametrize(("size", "batch"), [(8, (2, 3)), (1, ())], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_values_and_gradients(product: Product, size: int, batch: tuple[int, ...], check_vma: bool) -> None:
    mesh = mesh_of(size)
    x, w = operands(size, *batch)
    ours, plain = (
        jax.jit(jax.value_and_grad(sine_of(on_mesh(product, mesh, plain=plain, check_vma=check_vma)), (0, 1)))
        for plain in (False, True)
    )
    for found, wanted in zip(jax.tree.leaves(ours(x, w)), jax.tree.leaves(plain(x, w)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@EACH
def test_double_precision_against_finite_differences(product: Product, x64: None) -> None:
    """First and second derivatives, which have products of all kinds."""
    x, w = operands(2, dtype=jnp.float64)
    check_grads(jax.jit(on_mesh(product, mesh_of(2))), (x, w), order=2, modes=["rev"], atol=1e-6, rtol=1e-6)


@settings(max_examples=8, deadline=None)
@given(
    product=st.sampled_from(list(PRODUCTS.values())),
    size=st.sampled_from([2, 3, 8]),
    rows=st.integers(1, 9),
    inner=st.integers(1, 9),
    columns=st.integers(1, 9),
)
def test_odd_sizes(product: Product, size: int, rows: int, inner: int, columns: int) -> None:
    x, w = normal(2, rows * size, inner * size), normal(3, inner * size, columns * size)
    mesh = mesh_of(size)
    found, wanted = (jax.jit(on_mesh(product, mesh, plain=plain))(x, w) for plain in (False, True))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("columns", [5, 24])
def test_all_reduce_of_rows_that_the_axis_does_not_divide(columns: int) -> None:
    x, w = normal(4, 2, 13, 16), normal(5, 16, columns)
    found, wanted = (
        jax.jit(on_mesh(PRODUCTS["all_reduce"], mesh_of(8), plain=p))(x, w) for p in (False, True)
    )
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float32"])
def test_sums_of_16_bits(name: str, wire_dtype: str | None) -> None:
    """Products travel rounded to bfloat16, or in float32, and are added up in float32, rank after rank."""
    size = 8
    x, w = operands(size, dtype=jnp.bfloat16)
    options = CollectiveOptions(wire_dtype=wire_dtype)
    found = jax.jit(on_mesh(PRODUCTS[name], mesh_of(size), options=options))(x, w)
    wire = jnp.dtype(wire_dtype or "bfloat16")
    total = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for x_part, w_part in zip(np.split(x, size, axis=1), np.split(w, size, axis=0), strict=True):
        part = x_part.astype(np.float32) @ w_part.astype(np.float32)
        total += part.astype(wire).astype(np.float32)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), total, rtol=BF16_ULP, atol=BF16_ULP / 8)


def test_sums_have_the_order_of_ranks() -> None:
    """In another order the large numbers would not cancel, or swallow others."""
    parts = np.array([1e8, 3, -1e8, 1, 2, -2, 5, 7], np.float32)
    total = np.float32(0)
    for part in parts:
        total += part
    found = jax.jit(on_mesh(PRODUCTS["reduce_scatter"], mesh_of(8)))(
        np.tile(parts, (8, 1)), np.ones((8, 1), np.float32)
    )
    np.testing.assert_array_equal(found, np.full((8, 1), total))


COLLECTIVES = {
    "all_gather": ["all_gather", "all_gather", "all_to_all"],
    "reduce_scatter": ["all_gather", "all_gather", "all_to_all"],
    "all_reduce": ["all_gather_invariant", "all_to_all"],
    "all_to_all": ["all_to_all", "all_to_all", "psum_invariant"],
}
"""Lists what both passes send. All-to-alls carry parts of sums, and no cotangent of an all-reduce travels.
Weights that all ranks have, of the product with an all-to-all, get the sum of their gradients."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_travels(name: str) -> None:
    """No pass gathers what it could sum, or sends a cotangent that all ranks have."""
    x, w = operands(8)
    run = on_mesh(PRODUCTS[name], mesh_of(8))
    text = str(jax.make_jaxpr(jax.grad(lambda x, w: run(x, w).sum(), argnums=(0, 1)))(x, w))
    found = re.findall(r"= (all_gather_invariant|all_gather|all_to_all|psum\w*|reduce_scatter)\[", text)
    assert sorted(found) == COLLECTIVES[name]


@EACH
def test_vmap(product: Product) -> None:
    xs, ws = normal(6, 3, 16, 32), normal(7, 3, 32, 24)
    run = jax.jit(on_mesh(product, mesh_of(8)))
    for axes, args in (((0, 0), (xs, ws)), ((0, None), (xs, ws[0])), ((None, 0), (xs[0], ws))):
        found = jax.vmap(run, in_axes=axes)(*args)
        wanted = [
            run(args[0][i] if axes[0] == 0 else args[0], args[1][i] if axes[1] == 0 else args[1])
            for i in range(3)
        ]
        np.testing.assert_allclose(found, np.stack(wanted), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_products_whose_implementation_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels would pay, a primitive is bound, which is the same plain JAX on other devices."""
    mesh, (x, w) = mesh_of(2), operands(16, 2, dtype=jnp.bfloat16)
    xs, ws = jnp.stack([x, 2 * x]), jnp.stack([w, 3 * w])

    def results(implementation: Literal["xla"] | None) -> Any:
        run = on_mesh(PRODUCTS[name], mesh, options=CollectiveOptions(implementation=implementation))
        gradients = jax.grad(lambda x, w: sine_of(run)(x, w).astype(jnp.float32), (0, 1))
        text = str(jax.make_jaxpr(gradients)(x, w))
        bound = re.findall(r"jaxmagi_(all_gather_matmul|matmul_reduce_scatter)", text)
        mapped = [jax.vmap(run, axes)(xs, ws if axes[1] == 0 else w) for axes in ((0, None), (0, 0))]
        mapped.append(jax.jit(jax.vmap(gradients))(xs, ws))
        return len(bound), (run(x, w), jax.jit(gradients)(x, w), *mapped)

    monkeypatch.setattr(_choice, "_pays", lambda *_: True)
    (none, plain), (bound, chosen) = results("xla"), results(None)
    assert (none, bound) == (0, 2)
    jax.tree.map(np.testing.assert_array_equal, chosen, plain)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("shapes", ["b, 16, 32", "2, 2*r, 32"])
def test_symbolic_shapes_can_be_exported(name: str, shapes: str) -> None:
    """Nobody knows whether a kernel would pay."""
    x = jax.ShapeDtypeStruct(export.symbolic_shape(shapes), jnp.bfloat16)
    run = jax.jit(on_mesh(PRODUCTS[name], mesh_of(2)))
    exported = export.export(run, platforms=("cpu", "cuda"))(x, jax.ShapeDtypeStruct((32, 16), jnp.bfloat16))
    assert "custom_call @jaxmagi" not in exported.mlir_module()


@EACH
def test_16_bits_stay_in_products(product: Product) -> None:
    """Both passes multiply bfloat16, and gradients come in it."""
    x, w = operands(8, 2, dtype=jnp.bfloat16)
    gradients = jax.grad(sine_of(on_mesh(product, mesh_of(8))), argnums=(0, 1))
    text = jax.jit(gradients).lower(x, w).as_text()
    dots = re.findall(r"stablehlo\.dot_general.*: \((tensor<.*>), (tensor<.*>)\) ->", text)
    assert len(dots) >= 3 and all("bf16" in operand for dot in dots for operand in dot)
    wide = jax.grad(sine_of(on_mesh(product, mesh_of(8), plain=True)), argnums=(0, 1))
    wanted = jax.jit(wide)(x.astype(jnp.float32), w.astype(jnp.float32))
    for ours, theirs in zip(jax.jit(gradients)(x, w), wanted, strict=True):
        assert ours.dtype == jnp.bfloat16
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours.astype(np.float32) / scale, theirs / scale, rtol=0, atol=0.03)


@EACH
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_weights_over_an_explicit_axis(product: Product, spec: P) -> None:
    """Weights and their gradients lie over the axis of the data: fully sharded data parallelism."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(AxisType.Explicit, AxisType.Auto))
    x, w = normal(15, 4, 16, 32), normal(16, 32, 24)
    wanted = jax.jit(jax.grad(sine_of(on_mesh(product, mesh_of(4), plain=True)), argnums=(0, 1)))(x, w)
    with jax.set_mesh(mesh):
        examples = jax.device_put(x, P("data") if spec == P("data") else P())
        weights = jax.device_put(w, spec)
        found = jax.jit(jax.grad(sine_of(on_mesh(product, mesh)), argnums=(0, 1)))(examples, weights)
        cut = tuple(spec).index("data")
        assert "data" in np.atleast_1d(found[1].sharding.spec[cut])
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@EACH
def test_precision_holds_for_gradients(product: Product) -> None:
    x, w = operands(8)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return on_mesh(product, mesh_of(8))(x, w).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) >= 2 and all("precision = [HIGHEST, HIGHEST]" in line for line in dots)


def test_layers_in_a_scan_with_remat() -> None:
    """A Megatron block with sequence parallelism, layer after layer, against one device."""
    gather, scatter = PRODUCTS["all_gather"].function, PRODUCTS["reduce_scatter"].function
    x = normal(8, 16, 8)
    ups, downs = 0.3 * normal(9, 3, 8, 32), 0.3 * normal(10, 3, 32, 8)

    def layers(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            up, down = weights
            return x + scatter(jax.nn.gelu(gather(x, up, AXIS)), down, AXIS), None

        return jax.lax.scan(layer, x, (ups, downs))[0]

    cut = P(AXIS), P(None, None, AXIS), P(None, AXIS)
    spread = jax.shard_map(layers, mesh=mesh_of(8), in_specs=cut, out_specs=P(AXIS))

    def plain(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        for up, down in zip(ups, downs, strict=True):
            x = x + jax.nn.gelu(x @ up) @ down
        return x

    found, wanted = (
        jax.jit(jax.grad(sine_of(run), argnums=(0, 1, 2)))(x, ups, downs) for run in (spread, plain)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@EACH
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_beside_another_axis(product: Product, kind: AxisType) -> None:
    """Examples are spread over an axis that shard_map leaves out."""
    mesh = jax.make_mesh((2, 4), ("data", AXIS), axis_types=(kind, AxisType.Auto))
    x, w = normal(11, 4, 16, 32), normal(12, 32, 24)
    wanted = jax.jit(on_mesh(product, mesh_of(4), plain=True))(x, w)
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        found = jax.jit(on_mesh(product, mesh))(spread, w)
        assert found.sharding.spec[0] == "data"
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_weights_that_all_ranks_have() -> None:
    """Their gradients are the sums over ranks."""
    gather = PRODUCTS["all_gather"].function
    x, w = normal(13, 16, 8), normal(14, 8, 4)

    def loss(w: jax.Array) -> jax.Array:
        def of_rank(x: jax.Array, w: jax.Array) -> jax.Array:
            weight = 1.0 + jax.lax.axis_index(AXIS).astype(jnp.float32)
            return jax.lax.psum(weight * jnp.sin(gather(x, w, AXIS)).sum(), AXIS)

        return jax.shard_map(of_rank, mesh=mesh_of(8), in_specs=(P(AXIS), P()), out_specs=P())(x, w)

    wanted = jax.grad(lambda w: 36.0 * jnp.sin(x @ w).sum())(w)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), wanted, rtol=1e-4, atol=1e-4)


def test_without_jit() -> None:
    x, w = operands(8)
    found, wanted = (
        on_mesh(PRODUCTS["all_reduce"], mesh_of(8), plain=plain)(x, w) for plain in (False, True)
    )
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (
            (8, 4),
            (5, 4),
            r"x must be \[..., M, K\] and w \[K, N\], but they have shapes \(8, 4\) and \(5, 4\).",
        ),
        ((4,), (4, 4), r"but they have shapes \(4,\) and \(4, 4\)."),
        ((8, 4), (1, 4, 4), r"but they have shapes \(8, 4\) and \(1, 4, 4\)."),
        (
            (9, 4),
            (4, 4),
            r"x must have rows that the size 8 of mesh axis 'tensor' divides, but has shape \(9, 4\).",
        ),
    ],
)
def test_shapes_that_do_not_fit(x: tuple[int, ...], w: tuple[int, ...], message: str) -> None:
    run = jax.shard_map(
        lambda: matmul_reduce_scatter(jnp.ones(x), jnp.ones(w), AXIS),
        mesh=mesh_of(8),
        in_specs=(),
        out_specs=P(AXIS),
    )
    with pytest.raises(ValueError, match=message):
        run()


def test_empty_arrays() -> None:
    with pytest.raises(ValueError, match=r"must not be empty, but they have shapes \(0, 4\) and \(4, 4\)"):
        on_mesh(PRODUCTS["all_gather"], mesh_of(2))(jnp.ones((0, 4)), jnp.ones((4, 8)))


def test_an_all_to_all_sums_nothing() -> None:
    run = on_mesh(PRODUCTS["all_to_all"], mesh_of(2), options=CollectiveOptions(wire_dtype="float32"))
    with pytest.raises(ValueError, match="wire_dtype=float32, but matmul_all_to_all sums nothing"):
        run(jnp.ones((4, 4)), jnp.ones((4, 4)))


def test_columns_that_the_axis_does_not_divide() -> None:
    run = on_mesh(PRODUCTS["all_to_all"], mesh_of(8))
    with pytest.raises(ValueError, match=r"w must have columns that the size 8 .* but has shape \(4, 9\)"):
        run(jnp.ones((8, 4)), jnp.ones((4, 9)))


@pytest.mark.parametrize(
    ("x", "w", "options", "error", "message"),
    [
        (
            jnp.bfloat16,
            jnp.float32,
            {},
            ValueError,
            "must have the same dtype .* but have bfloat16 and float32",
        ),
        (jnp.int32, jnp.int32, {}, ValueError, "but have int32 and int32"),
        (jnp.bfloat16, jnp.bfloat16, {"wire_dtype": "float64"}, ValueError, "products accumulate in float32"),
        (jnp.float32, jnp.float32, {"implementation": "nccl"}, NotImplementedError, 'implementation="nccl"'),
    ],
)
def test_dtypes_and_options_that_do_not_fit(
    x: Any, w: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    run = on_mesh(PRODUCTS["reduce_scatter"], mesh_of(2), options=CollectiveOptions(**options))
    with pytest.raises(error, match=message):
        run(jnp.ones((4, 4), x), jnp.ones((4, 4), w))


def test_axes_that_are_none() -> None:
    x, w = jnp.ones((4, 4)), jnp.ones((4, 4))
    with pytest.raises(
        ValueError, match=r"axis_name='tensor' is no mesh axis that a surrounding jax.shard_map maps"
    ):
        matmul_reduce_scatter(x, w, AXIS)
    with pytest.raises(ValueError, match="axis_name must be a str, but it is 3"):
        matmul_reduce_scatter(x, w, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"options must be a jaxmagi\.CollectiveOptions, but it is str"):
        jax.shard_map(
            lambda x: matmul_reduce_scatter(x, w, AXIS, options="xla"),  # pyright: ignore[reportArgumentType]
            mesh=mesh_of(2),
            in_specs=P(AXIS),
            out_specs=P(AXIS),
        )(x)
