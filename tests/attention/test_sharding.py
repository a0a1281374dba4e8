"""Batch and heads sharded by XLA's partitioner: nothing is gathered but what the mathematics needs.

The collectives of a program are read from what XLA has compiled.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxmagi import _native, masks
from jaxmagi.attention import _partitioning, attention
from jaxmagi.masks import AttnMask
from tests.cases import FP64_TOLERANCE
from tests.compiled import collectives

from . import helpers
from .helpers import gradients, make_inputs, max_error

BATCH, LENGTH, DIM = 4, 40, 8
SHARED = masks.documents([25, 15])
PER_EXAMPLE = AttnMask.stack([SHARED, masks.causal(LENGTH), masks.full(LENGTH), SHARED])
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


class Case(NamedTuple):
    """Operands on a mesh, and the collectives in the program that differentiates attention to them."""

    axes: dict[str, int]
    query: P
    key: P  # of the value too
    backward: dict[str, int]
    heads: int = 8
    kv_heads: int = 4
    mask: AttnMask = SHARED

    def mesh(self, kind: AxisType = AxisType.Auto) -> Mesh:
        return jax.make_mesh(tuple(self.axes.values()), tuple(self.axes), (kind,) * len(self.axes))

    def operands(self, rng: np.random.Generator) -> tuple[Any, ...]:
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": DIM, "v_dim": DIM}
        x = make_inputs(rng, batch=(BATCH,), q_len=LENGTH, kv_len=LENGTH, dtype=np.float64, **sizes)
        return x.query, x.key, x.value, x.sinks

    def place(self, mesh: Mesh, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        specs = (self.query, self.key, self.key, P(*self.query[2:3]))
        return tuple(
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)
        )


BOTH, HEADS = P("data", None, "tensor"), P(None, None, "tensor")
CASES = {
    "batch": Case({"data": 4}, P("data"), P("data"), {"all-reduce f64[8]": 1}),
    "heads": Case({"tensor": 4}, HEADS, HEADS, {}),
    "batch and heads": Case({"data": 2, "tensor": 4}, BOTH, BOTH, {"all-reduce f64[2]": 1}, mask=PER_EXAMPLE),
    "batch over two axes": Case(
        {"data": 2, "fsdp": 2, "tensor": 2},
        P(("data", "fsdp"), None, "tensor"),
        P(("data", "fsdp"), None, "tensor"),
        {"all-reduce f64[4]": 1},
        mask=PER_EXAMPLE,
    ),
    "heads over two axes": Case(
        {"tensor": 2, "expert": 2},
        P(None, None, ("tensor", "expert")),
        P(None, None, ("tensor", "expert")),
        {},
    ),
    # Gradients of key heads are added up over the devices that share them. As keys are whole, so are these.
    "more devices than key heads": Case(
        {"data": 2, "tensor": 4},
        BOTH,
        P("data"),
        {"all-reduce f64[2,40,1,8]": 2, "all-gather f64[2,40,2,8]": 2, "all-reduce f64[2]": 1},
        kv_heads=2,
        mask=PER_EXAMPLE,
    ),
    "one key head": Case({"tensor": 8}, HEADS, P(), {"all-reduce f64[4,40,1,8]": 2}, kv_heads=1),
    "groups are cut": Case({"tensor": 3}, HEADS, P(), {"all-reduce f64[4,40,2,8]": 2}, heads=6, kv_heads=2),
}


attend = functools.partial(helpers.attend, mask=SHARED)


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert max_error(a, b) <= FP64_TOLERANCE


def check(case: Case, attend: Any, operands: tuple[Any, ...], mesh: Mesh) -> Any:
    """Checks values and gradients against one device, and the collectives; returns the sharded results."""
    want = gradients(attend)(*operands)
    placed = case.place(mesh, operands)
    with jax.set_mesh(mesh):
        forward = jax.jit(attend).lower(*placed).compile()
        both = gradients(attend).lower(*placed).compile()
        got = both(*placed)
    assert not collectives(forward.as_text())
    assert collectives(both.as_text()) == case.backward
    assert_same(got, want)
    return got


@pytest.mark.parametrize("name", CASES)
def test_auto_axes(name: str, x64: None, rng: np.random.Generator) -> None:
    case = CASES[name]
    _, (out, lse) = check(case, functools.partial(attend, mask=case.mask), case.operands(rng), case.mesh())
    assert out.sharding.spec == case.query and lse.sharding.spec == case.query


@pytest.mark.parametrize(
    ("name", "kind"),
    [("batch and heads", AxisType.Auto), ("more devices than key heads", AxisType.Explicit)],
)
def test_implementations(
    name: str, kind: AxisType, implementation: str, x64: None, rng: np.random.Generator
) -> None:
    """Partitioning is one rule above all implementations: a case of each kind of axes will do for each."""
    case = CASES[name]
    function = functools.partial(attend, mask=case.mask, implementation=implementation)
    _, (out, lse) = check(case, function, case.operands(rng), case.mesh(kind))
    if kind == AxisType.Explicit:
        assert jax.typeof(out).sharding.spec == P(*case.query, None)
        assert jax.typeof(lse).sharding.spec == case.query


def test_constraints_inside_of_a_program(x64: None, rng: np.random.Generator) -> None:
    """Operands are computed, and sharded by annotations, as MaxText does it."""
    case = CASES["batch and heads"]
    operands, mesh = case.operands(rng), case.mesh()

    def annotated(*operands: Any) -> Any:
        query, key, value = (
            jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, BOTH)) for x in operands[:3]
        )
        return attend(query, key, value, operands[3], mask=case.mask)

    check(case, annotated, operands, mesh)


def test_operands_sharded_differently(x64: None, rng: np.random.Generator) -> None:
    """Query by batch and keys by heads: attention is split by both."""
    case = CASES["batch and heads"]._replace(query=P("data"), key=HEADS)
    _, (out, _) = check(case, attend, case.operands(rng), case.mesh())
    assert out.sharding.spec == BOTH


def test_heads_out_of_sharded_columns(x64: None, rng: np.random.Generator) -> None:
    """Six heads come from columns that are sharded four ways: right, whatever the partitioner makes of it."""
    mesh = CASES["heads"].mesh()
    x, key, value = rng.normal(size=(3, LENGTH, 6 * DIM))
    projection = rng.normal(size=(6 * DIM, 6 * DIM))

    def project(x: Any, projection: Any, key: Any, value: Any) -> Any:
        query, key, value = (y.reshape(LENGTH, 6, DIM) for y in (x @ projection, key, value))
        return attention(query, key, value, SHARED)

    want = jax.jit(project)(x, projection, key, value)
    columns = NamedSharding(mesh, P(None, "tensor"))
    with jax.set_mesh(mesh):
        got = jax.jit(project)(x, jax.device_put(projection, columns), key, value)
    assert_same(got, want)


@KINDS
@pytest.mark.parametrize("axis_name", ["data", "tensor"])
def test_inside_a_shard_map_over_other_axes(
    kind: AxisType, axis_name: str, x64: None, rng: np.random.Generator
) -> None:
    """Attention stays sharded over the axis that the shard_map leaves to the compiler."""
    case = CASES["batch and heads"]
    check(case, map_over(axis_name, case), case.operands(rng), case.mesh(kind))


@KINDS
def test_inside_a_shard_map_with_more_devices_than_key_heads(
    kind: AxisType, x64: None, rng: np.random.Generator
) -> None:
    """Devices that share a key head are not known there: the backward pass repeats each key head."""
    case = CASES["more devices than key heads"]
    check(case, map_over("data", case), case.operands(rng), case.mesh(kind))


@KINDS
def test_inside_a_shard_map_with_an_axis_that_does_not_divide_key_heads(
    kind: AxisType, x64: None, rng: np.random.Generator
) -> None:
    case = Case({"data": 2, "tensor": 2}, BOTH, BOTH, {"all-reduce f64[4]": 1}, kv_heads=2, mask=PER_EXAMPLE)
    mesh = jax.make_mesh((1, 2, 2, 2), ("other", "data", "tensor", "idle"), (kind,) * 4)
    check(case, map_over("data", case), case.operands(rng), mesh)


@pytest.mark.parametrize("keys", [P("data", None, "tensor"), P("data")], ids=["first_axis", "whole"])
def test_key_heads_over_the_first_of_the_axes_of_query_heads(
    keys: P, x64: None, rng: np.random.Generator
) -> None:
    """Over Explicit axes, outside of shard_map and inside of one over the batch."""
    rows = P("data", None, ("tensor", "expert"))
    axes = {"data": 2, "tensor": 2, "expert": 2}
    case = Case(axes, rows, keys, {}, kv_heads=2, mask=PER_EXAMPLE)
    operands, mesh = case.operands(rng), case.mesh(AxisType.Explicit)
    function = functools.partial(attend, mask=PER_EXAMPLE)
    want = gradients(function)(*operands)
    with jax.set_mesh(mesh):
        for run in (function, map_over("data", case)):
            compiled = gradients(run).lower(*case.place(mesh, operands)).compile()
            assert_same(compiled(*case.place(mesh, operands)), want)
            assert {key.split()[0] for key in collectives(compiled.as_text())} <= {"all-reduce", "all-gather"}
            assert "f64[2,40,8,8]" not in str(collectives(compiled.as_text()))  # of query and output


def map_over(axis_name: str, case: Case) -> Any:
    """Returns attention under the mask of each example, inside of a shard_map over one axis of the mesh."""

    def kept(spec: P) -> P:
        return P(*(axis if axis == axis_name else None for axis in spec))

    def local(query: Any, key: Any, value: Any, sinks: Any, bands: Any) -> Any:
        return attend(query, key, value, sinks, mask=AttnMask(bands, LENGTH, LENGTH))

    def mapped(*operands: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty:  # on one device
            return attend(*operands, mask=PER_EXAMPLE)
        query, key = kept(case.query), kept(case.key)
        in_specs = (query, key, key, kept(P("tensor")), kept(P("data")))
        run: Any = jax.shard_map(local, in_specs=in_specs, out_specs=query, axis_names={axis_name})
        bands = jnp.asarray(PER_EXAMPLE.bands)
        if jax.sharding.get_abstract_mesh().explicit_axes:
            bands = jax.sharding.reshard(bands, in_specs[-1])
        return run(*operands, bands)

    return mapped


@pytest.mark.parametrize(("axis", "sinks_of_a_device"), [(0, "2"), (2, "1,2")], ids=["batch", "heads"])
def test_vmap(axis: int, sinks_of_a_device: str, x64: None, rng: np.random.Generator) -> None:
    """The mapped axis is sharded, be it a batch or groups of heads."""
    backward = {f"all-reduce f64[{sinks_of_a_device}]": 1}
    case = CASES["batch and heads"]._replace(kv_heads=8, backward=backward)

    def mapped(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        if axis == 0:
            one = functools.partial(attend, sinks=sinks)
            return jax.vmap(lambda *x: one(*x))(query, key, value)
        query_, key, value = (x.reshape(*x.shape[:2], 4, 2, DIM) for x in (query, key, value))
        out, lse = jax.vmap(attend, (2, 2, 2, 0), (2, 2))(query_, key, value, sinks.reshape(4, 2))
        return out.reshape(query.shape), lse.reshape(query.shape[:3])

    check(case, mapped, case.operands(rng), case.mesh())


@pytest.mark.parametrize("policy", [None, "save"])
def test_scan_over_rematerialised_layers(policy: str | None, x64: None, rng: np.random.Generator) -> None:
    """Parameters of each layer, a donated input, and residuals saved by their names or computed again."""
    case = CASES["batch and heads"]._replace(kv_heads=8)
    query, _, _, sinks = case.operands(rng)
    layers = np.stack([sinks, -sinks])
    saved = jax.checkpoint_policies.save_only_these_names("jaxmagi_out", "jaxmagi_lse") if policy else None

    @functools.partial(jax.checkpoint, policy=saved)
    def layer(x: jax.Array, sinks: jax.Array) -> tuple[jax.Array, None]:
        return x + attention(jnp.sin(x), x, x[..., ::-1], case.mask, sinks=sinks), None

    def loss(x: jax.Array, layers: jax.Array) -> jax.Array:
        return (jax.lax.scan(layer, x, layers)[0] ** 2).sum()

    gradient = jax.grad(loss, argnums=(0, 1))
    want = jax.jit(gradient)(query, layers)
    mesh = case.mesh()
    with jax.set_mesh(mesh):
        specs = (BOTH, P(None, "tensor"))
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((query, layers), specs, strict=True)
        ]
        compiled = jax.jit(gradient, donate_argnums=0).lower(*placed).compile()
        got = compiled(*placed)
    assert placed[0].is_deleted()
    assert_same(got, want)
    text = compiled.as_text()
    assert text is not None and collectives(text) == {
        "all-reduce f64[2]": 1
    }  # of the sinks, in the body of the loop
    if has_kernels():
        calls = "jaxmagi_attention_forward", "jaxmagi_attention_backward"
        assert [text.count(f'custom_call_target="{call}"') for call in calls] == [1 if policy else 2, 1]


def has_kernels() -> bool:
    return _native.has_handler("jaxmagi_attention_forward", "cpu")


@KINDS
def test_sharded_length(kind: AxisType, x64: None, rng: np.random.Generator) -> None:
    """The result is right, and a warning, once, names the axis and what does not gather."""
    _partitioning.warn_of_gather.cache_clear()
    case = CASES["heads"]._replace(query=P(None, "tensor"), key=P(None, "tensor"))
    operands, mesh = case.operands(rng), case.mesh(kind)
    placed = case.place(mesh, operands)
    want = jax.jit(attend)(*operands)
    with jax.set_mesh(mesh):
        with pytest.warns(RuntimeWarning) as caught:
            got = jax.jit(attend)(*placed)
        jax.jit(lambda *operands: attend(*operands))(*placed)  # compiles again, and does not warn
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 3 and len(set(messages)) == 3  # query, key and value
    for message in messages:
        assert "sharded in its length over mesh axis tensor" in message and "context_attention" in message
    assert_same(got, want)


def test_older_partitioner(x64: None, rng: np.random.Generator) -> None:
    """GSPMD, which ``jax_use_shardy_partitioner=False`` still selects, keeps them sharded too."""
    case = CASES["batch and heads"]
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        check(case, functools.partial(attend, mask=case.mask), case.operands(rng), case.mesh())
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_what_a_program_is_known_by(rng: np.random.Generator) -> None:
    """JAX finds compiled programs by their text without pointers, so parameters have to be in it."""
    case = CASES["batch and heads"]
    mesh = case.mesh()
    with jax.set_mesh(mesh):
        query, key, value, _ = case.place(mesh, case.operands(rng))

        def text(scale: float, implementation: str) -> str:
            attend = functools.partial(attention, mask=SHARED, scale=scale, implementation=implementation)
            lowered = jax.jit(lambda *rows: attend(*rows)).lower(query, key, value).as_text()
            return re.sub(r'backend_config = "\d+"', "", lowered)

        assert text(0.5, "xla") == text(0.5, "xla") != text(0.25, "xla")
        if has_kernels():
            assert text(0.5, "ffi") != text(0.5, "xla")


def test_sharded_head_dimension(x64: None, rng: np.random.Generator) -> None:
    _partitioning.warn_of_gather.cache_clear()
    case = CASES["heads"]._replace(query=P(None, None, None, "tensor"), key=P())
    operands, mesh = case.operands(rng), case.mesh()
    query, key, value, sinks = operands
    with jax.set_mesh(mesh), pytest.warns(RuntimeWarning) as caught:
        got = jax.jit(attend)(jax.device_put(query, NamedSharding(mesh, case.query)), key, value, sinks)
    message = "gathers query, which is sharded in its head dimension over mesh axis tensor"
    assert any(message in str(warning.message) for warning in caught)
    assert_same(got, jax.jit(attend)(*operands))
