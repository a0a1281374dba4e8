"""jax.export: what is exported runs in a new process, which has the same results."""

import functools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from jaxmagi import _export, attention, context_attention, dispatch, masks, plan_context

from .context.harness import AXIS, make_mesh

MASK = masks.documents([40, 3, 21])
KERNELS = ("jaxmagi_attention_forward", "jaxmagi_attention_backward")
READER = """
import pickle, sys
import jax
from jax.sharding import NamedSharding, PartitionSpec
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jaxmagi

def call(exported, operands):
    exported = jax.export.deserialize(exported)
    mesh = jax.make_mesh((exported.nr_devices,), ("context",))
    return exported.call(*jax.device_put(operands, NamedSharding(mesh, PartitionSpec())))

with open(sys.argv[1], "rb") as file:
    cases = pickle.load(file)
results = [call(*case) for case in cases]
with open(sys.argv[2], "wb") as file:
    pickle.dump(jax.device_get(results), file)
"""


def operands() -> list[np.ndarray]:
    """Query, key and value."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(MASK.q_len, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]


def gradients(attend: Callable[..., jax.Array], *operands: Any) -> Any:
    """The output, and the gradients of query, key and value for a cotangent of ones."""
    *rows, mask = operands
    out, pull = jax.vjp(lambda *rows: attend(*rows, mask), *rows)
    return out, *pull(jnp.ones_like(out))


def on_one_device(implementation: Literal["ffi", "xla"]) -> tuple[Any, tuple[Any, ...]]:
    attend = functools.partial(attention, implementation=implementation)
    return jax.jit(functools.partial(gradients, attend)), (*operands(), MASK)


def over_a_mesh() -> tuple[Any, tuple[Any, ...]]:
    """Context attention in both passes, by a plan that is an argument."""
    plan = plan_context(MASK, 8, chunk_size=4)
    rows = P(AXIS)
    attend = functools.partial(context_attention, axis_name=AXIS)
    mapped = jax.shard_map(attend, mesh=make_mesh(8), in_specs=(rows, rows, rows, rows), out_specs=rows)
    return jax.jit(functools.partial(gradients, mapped)), (*[dispatch(x, plan) for x in operands()], plan)


def test_runs_in_a_new_process(tmp_path: Path) -> None:
    """Plain XLA; kernels, with the check of custom calls off; and kernels over eight devices."""
    allowed = [export.DisabledSafetyCheck.custom_call(target) for target in KERNELS]
    cases = [(*on_one_device("xla"), []), (*on_one_device("ffi"), allowed), (*over_a_mesh(), allowed)]
    exported = [(export.export(f, disabled_checks=off)(*given).serialize(), given) for f, given, off in cases]
    written, read = tmp_path / "exported", tmp_path / "results"
    written.write_bytes(pickle.dumps(exported))
    subprocess.run([sys.executable, "-c", READER, str(written), str(read)], check=True, timeout=300)
    for (f, given, _), got in zip(cases, pickle.loads(read.read_bytes()), strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, f(*given))


def test_kernels_are_not_exported_by_default() -> None:
    f, given = on_one_device("ffi")
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        export.export(f)(*given)


@pytest.mark.parametrize("ranks_per_host", [None, 2])
def test_plans_and_masks_come_back(ranks_per_host: int | None) -> None:
    """With one level and two."""
    plan = plan_context(MASK, 4, chunk_size=4)
    plan = plan if ranks_per_host is None else plan.by_host(ranks_per_host)
    exported = export.export(jax.jit(lambda *given: given))(plan, MASK)
    got = export.deserialize(exported.serialize()).call(plan, MASK)
    assert jax.tree.structure(got) == jax.tree.structure((plan, MASK))
    jax.tree.map(np.testing.assert_array_equal, got, (plan, MASK))


def test_masks_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fields might mean something else."""
    exported = export.export(jax.jit(lambda mask: mask))(MASK)
    monkeypatch.setattr(_export, "_VERSION", 0)
    old = exported.serialize()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="masks or plans of version 0, and this jaxmagi reads version 2"):
        export.deserialize(old)
