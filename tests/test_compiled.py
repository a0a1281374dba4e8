"""Collectives are found in compiled programs, combined ones too."""

from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec as P

from .compiled import collective_names, collectives


def compiled(function: Any, out_specs: P, *shape: int) -> str | None:
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, "float32")).compile().as_text()


def test_all_gather() -> None:
    text = compiled(lambda x: jax.lax.all_gather(x, "x", tiled=True), P(), 8, 3)
    assert collectives(text) == {"all-gather f32[8,3]": 1}


def test_several_arrays_in_one() -> None:
    text = compiled(lambda x: jax.lax.psum((x, x.sum(0)), "x"), P(), 8, 3)
    assert collectives(text) == {"all-reduce f32[2,3]": 1, "all-reduce f32[3]": 1}
    assert collective_names(text) == {"all-reduce": 2}


def test_others() -> None:
    def function(x: jax.Array) -> jax.Array:
        x = jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])
        x = jax.lax.all_to_all(x, "x", 0, 0)
        return jax.lax.psum_scatter(x, "x", tiled=True)

    names = collective_names(compiled(function, P("x"), 16, 3))
    assert names.keys() == {"collective-permute", "all-to-all", "reduce-scatter"}


def test_nothing_is_sent() -> None:
    assert not collectives(compiled(lambda x: x + 1, P("x"), 8, 3))


def test_many_arrays_in_one() -> None:
    shapes = "f32[2]{0}, f32[3]{0}, f32[4]{0}, f32[5]{0}, f32[6]{0}, /*index=5*/f32[7]{0}"
    assert collectives(f"  %a = ({shapes}) all-gather(%b)").total() == 6


def test_in_two_halves() -> None:
    text = "  %a = (f32[2]{0}, f32[8]{0}) all-gather-start(%b)\n  %c = f32[8]{0} all-gather-done(%a)"
    assert collectives(text) == {"all-gather f32[8]": 1}
