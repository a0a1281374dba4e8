"""Collectives are found in compiled programs, combined ones too."""

from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec as P

from .compiled import collective_names, collectives


def compiled(function: Any, out_specs: P) -> str | None:
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((16, 3), "float32")).compile().as_text()


def test_programs() -> None:
    text = compiled(lambda x: jax.lax.all_gather(x, "x", tiled=True), P())
    assert collectives(text) == {"all-gather f32[16,3]": 1}
    text = compiled(lambda x: jax.lax.psum((x, x.sum(0)), "x"), P())
    assert collectives(text) == {"all-reduce f32[4,3]": 1, "all-reduce f32[3]": 1}
    moved = compiled(lambda x: jax.lax.ppermute(jax.lax.all_to_all(x, "x", 0, 0), "x", [(0, 1)]), P("x"))
    assert collective_names(moved).keys() == {"collective-permute", "all-to-all"}
    assert not collectives(compiled(lambda x: x + 1, P("x")))


def test_text_of_gpus() -> None:
    shapes = "f32[2]{0}, f32[3]{0}, f32[4]{0}, f32[5]{0}, f32[6]{0}, /*index=5*/f32[7]{0}"
    assert collectives(f"  %a = ({shapes}) all-gather(%b)").total() == 6
    text = "  %a = (f32[2]{0}, f32[8]{0}) all-gather-start(%b)\n  %c = f32[8]{0} all-gather-done(%a)"
    assert collectives(text) == {"all-gather f32[8]": 1}
