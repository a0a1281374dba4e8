"""The handlers on the GPU, called without the checks of the Python code: they name what does not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import _native
from jaxmagi.attention import _cuda

pytestmark = pytest.mark.gpu

LENGTH, HEADS, BANDS, DIM = 300, 2, 5, 64
ATTRIBUTES: dict[str, dict[str, Any]] = {
    _cuda.TILE_SCHEDULE: {
        "q_len": np.int64(LENGTH),
        "kv_len": np.int64(LENGTH),
        "own_len": np.int64(LENGTH),
        "by_keys": np.bool_(False),
        "dim": np.int64(DIM),
        "v_dim": np.int64(DIM),
    },
    _cuda.FORWARD: {"scale": np.float64(1), "soft_cap": np.float64(0), "sm_margin": np.int64(0)},
    _cuda.BACKWARD: {
        "scale": np.float64(1),
        "soft_cap": np.float64(0),
        "deterministic": np.bool_(False),
        "sm_margin": np.int64(0),
    },
}
NUM_RESULTS = {_cuda.TILE_SCHEDULE: 3, _cuda.FORWARD: 3, _cuda.BACKWARD: 4}


def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def arrays(target: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments and results by name, as they have to be."""
    extension = _native.extension("cuda")
    assert extension is not None, "jaxmagi was built without CUDA"
    rows, _ = extension.forward_tile(DIM, DIM)
    plan = {"sorted": array(1, BANDS, 8), "tiles": array(1, -(-LENGTH // rows), 8)}
    if target == _cuda.TILE_SCHEDULE:
        words = extension.tile_schedule_workspace_words(1, BANDS, -(-LENGTH // rows))
        return {"bands": array(1, BANDS, 6), **plan, "workspace": array(words, 2)}
    tensor = array(1, LENGTH, HEADS, DIM, dtype=jnp.bfloat16)
    tensors = {"q": tensor, "k": tensor, "v": tensor}
    lse = array(1, LENGTH, HEADS, dtype=jnp.float32)
    if target == _cuda.BACKWARD:
        _, keys = extension.backward_tile(DIM, DIM)
        num_tiles = -(-LENGTH // keys)
        plan["tiles"] = array(1, num_tiles, 8)
        shape = LENGTH, LENGTH, HEADS, HEADS, DIM, DIM, num_tiles
        size = extension.backward_workspace_bytes(1, *shape, 1, False)
        gradients = {f"d{name}": tensor for name in tensors}
        operands = {**tensors, **plan, "dout": tensor, "lse": lse, "delta": lse}
        return {**operands, **gradients, "workspace": array(size // 16, 4)}
    sinks = array(HEADS, dtype=jnp.float32)
    return {**tensors, **plan, "sinks": sinks, "out": tensor, "lse": lse, "counter": array(1)}


def call(target: str, change: dict[str, jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """A custom call, on zeros."""
    given = list((arrays(target) | change).values())
    results = given[-NUM_RESULTS[target] :]
    function = jax.ffi.ffi_call(target, results)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in given[: -len(results)]]
    return jax.block_until_ready(jax.jit(lambda *args: function(*args, **ATTRIBUTES[target]))(*zeros))


@pytest.mark.parametrize("target", [_cuda.TILE_SCHEDULE, _cuda.FORWARD, _cuda.BACKWARD])
def test_what_fits_runs(target: str) -> None:
    call(target, {})


@pytest.mark.parametrize(
    ("target", "change", "message"),
    [
        (_cuda.TILE_SCHEDULE, {"bands": array(1, BANDS, 7)}, r"bands must have shape .*, got \[1, 5, 7\]"),
        (_cuda.TILE_SCHEDULE, {"bands": array(1, BANDS, 6, dtype=jnp.float32)}, "bands must be s32, got f32"),
        (
            _cuda.TILE_SCHEDULE,
            {"sorted": array(1, BANDS, 6)},
            r"sorted must have shape \[1, 5, 8\], got \[1, 5, 6\]",
        ),
        (
            _cuda.TILE_SCHEDULE,
            {"workspace": array(1, 2)},
            r"workspace must have shape \[\d+, 2\], got \[1, 2\]",
        ),
        (_cuda.TILE_SCHEDULE, {"tiles": array(1, 1, 8)}, r"there must be (\d) to \1 tiles, got 1"),
        (_cuda.FORWARD, {"tiles": array(1, 7, 8)}, r"tiles must have shape \[1, \d, 8\], got \[1, 7, 8\]"),
        (_cuda.FORWARD, {"sorted": array(2, BANDS, 8)}, "1 tile schedule or one for each .*, got 2"),
        (_cuda.FORWARD, {"sorted": array(1, BANDS, 8, dtype=jnp.float32)}, "sorted must be s32, got f32"),
        (_cuda.FORWARD, {"q": array(1, LENGTH, HEADS, DIM)}, "q must be bf16 or f16, got s32"),
        (_cuda.FORWARD, {"lse": array(1, LENGTH, HEADS)}, "lse must be f32, got s32"),
        (_cuda.BACKWARD, {"delta": array(1, LENGTH, HEADS)}, "delta must be f32, got s32"),
        (_cuda.BACKWARD, {"dk": array(1, LENGTH, HEADS, DIM, dtype=jnp.float32)}, "dk must be bf16, got f32"),
        (_cuda.BACKWARD, {"tiles": array(1, 3, 4)}, r"tiles must have shape \[1, 3, 8\], got \[1, 3, 4\]"),
        (_cuda.BACKWARD, {"tiles": array(1, 4, 8)}, "there must be 3 to 3 tiles, got 4"),
        (_cuda.BACKWARD, {"workspace": array(7, 4)}, r"workspace must have shape .*, got \[7, 4\]"),
    ],
)
def test_what_does_not_fit_is_named(
    target: str, change: dict[str, jax.ShapeDtypeStruct], message: str
) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{target}: .*{message}"):
        call(target, change)
