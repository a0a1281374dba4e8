"""Every misuse raises, and the message holds the values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagi import masks
from jaxmagi.attention import attention, attention_backward, attention_forward, flops
from jaxmagi.masks import AttnMask


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.zeros(shape, dtype)


GOOD: dict[str, Any] = {
    "query": zeros(2, 8, 4, 16),
    "key": zeros(2, 9, 2, 16),
    "value": zeros(2, 9, 2, 12),
    "mask": masks.causal(8, 9),
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": zeros(2, 8, 5, 16)}, r"query heads 5 must be a multiple of the number of key heads 2"),
        ({"key": zeros(2, 9, 2, 16, dtype=jnp.bfloat16)}, r"one dtype, but have float32, bfloat16, float32"),
        ({"mask": masks.causal(8, 10)}, r"\(q_len, kv_len\) = \(8, 10\).*lengths \(8, 9\)"),
        ({"mask": masks.causal(7, 9)}, r"\(q_len, kv_len\) = \(7, 9\).*lengths \(8, 9\)"),
        (
            {"mask": AttnMask.stack([masks.causal(8, 9)] * 3)},
            r"Per-example bands \(3, 8, 6\) need query \[3, T, N, D\].*has shape \(2, 8, 4, 16\)",
        ),
        ({"query": zeros(8, 16)}, r"query \(8, 16\), key \(2, 9, 2, 16\)"),
        ({"query": zeros(8, 4, 16)}, r"query \(8, 4, 16\), key \(2, 9, 2, 16\)"),
        ({"query": zeros(3, 8, 4, 16)}, r"one batch size.*\(3, 8, 4, 16\)"),
        ({"value": zeros(2, 9, 1, 12)}, r"agree in length and heads.*\(2, 9, 1, 12\)"),
        ({"query": zeros(2, 8, 4, 15)}, r"same head dimension.*\(2, 8, 4, 15\)"),
        ({"query": zeros(2, 8, 0, 16)}, r"There must be heads.*\(2, 8, 0, 16\)"),
        ({"scale": np.nan}, r"scale must be finite.*but is nan"),
        ({"scale": 1e39}, r"scale must be finite in float32, or None for D\*\*-0\.5, but is 1e\+39"),
        ({"scale": -1e39}, r"scale must be finite in float32.*but is -1e\+39"),
        ({"scale": -np.inf}, r"scale must be finite.*but is -inf"),
        ({"scale": True}, r"scale must be a number, but it is True"),
        ({"scale": "0.5"}, r"scale must be a number, but it is '0\.5'"),
        ({"scale": np.ones(1)}, r"scale must be a number, but it is array\(\[1\.\]\)"),
        ({"logits_soft_cap": True}, r"logits_soft_cap must be a number, but it is True"),
        ({"logits_soft_cap": "30"}, r"logits_soft_cap must be a number, but it is '30'"),
        ({"deterministic": "False"}, r"deterministic must be True or False, but it is 'False'"),
        ({"deterministic": None}, r"deterministic must be True or False, but it is None"),
        ({"query": np.ma.zeros((2, 8, 4, 16))}, r"query must not be a masked .* is MaskedArray\."),
        ({"key": np.ma.zeros((2, 9, 2, 16))}, r"key must not be a masked array"),
        ({"value": np.ma.zeros((2, 9, 2, 12))}, r"value must not be a masked array"),
        ({"sinks": np.ma.zeros(4)}, r"sinks must not be a masked array"),
        ({"query": None}, r"query must be an array, but jax cannot make one of it: None is not"),
        ({"value": "x"}, r"value must be an array, but jax cannot make one of it: Value 'x'"),
        ({"sinks": [[1], [1, 2]]}, r"sinks must be an array, but jax cannot .* inhomogeneous"),
        ({"logits_soft_cap": 0.0}, r"logits_soft_cap must be positive.*0\.0"),
        ({"logits_soft_cap": -3.0}, r"logits_soft_cap must be positive.*-3\.0"),
        ({"logits_soft_cap": np.inf}, r"logits_soft_cap must be positive.*inf"),
        ({"logits_soft_cap": np.nan}, r"logits_soft_cap must be positive.*nan"),
        ({"logits_soft_cap": 1e39}, r"normal number of float32.*1e\+39"),
        ({"logits_soft_cap": 1e-50}, r"normal number of float32.*1e-50"),
        ({"sinks": zeros(2)}, r"sinks must have shape \(4,\).*\(2,\)"),
        ({"sinks": zeros(4, dtype=jnp.int32)}, r"sinks must be floating-point, but are int32"),
        ({"implementation": "cudnn"}, r"implementation must be one of .*'cudnn'"),
        ({"sm_margin": -1}, r"sm_margin must be between 0 and 131, but it is -1"),
        ({"sm_margin": 132}, r"sm_margin must be between 0 and 131, but it is 132"),
        ({"sm_margin": 0.5}, r"sm_margin must be an integer, but it is 0\.5"),
        ({"mask": np.ones((8, 9), bool)}, r"an array of bool\[8, 9\].*masks\.causal.*AttnMask\.from_slices"),
        ({"mask": None}, r"must be an AttnMask, but is NoneType"),
    ],
)
def test_attention(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**(GOOD | change))


def test_large_scales_in_float64(x64: None) -> None:
    """They are within its range, though they would be infinite in float32."""
    ones = np.ones((1, 1, 1))
    _, lse = attention(ones, ones, ones, masks.full(1), scale=1e39, return_residual=True)
    assert lse.item() == 1e39


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.float8_e4m3fn])
def test_unsupported_dtypes(dtype: Any) -> None:
    operands = {name: GOOD[name].astype(dtype) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=rf"must be one of float64.*but is {jnp.dtype(dtype).name}"):
        attention(**(GOOD | operands))


def test_per_example_mask_without_batch() -> None:
    flat = {name: GOOD[name][0] for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=r"bands \(2, 8, 6\) need query \[2, T, N, D\].*\(8, 4, 16\)"):
        attention(**flat, mask=AttnMask.stack([masks.causal(8, 9)] * 2))


def test_errors_come_while_tracing() -> None:
    with pytest.raises(ValueError, match="must be a multiple"):
        jax.eval_shape(lambda q: attention(**(GOOD | {"query": q})), zeros(2, 8, 3, 16))


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32, jnp.bfloat16, np.array])
def test_kinds_of_numbers(kind: Any) -> None:
    ones = np.ones((1, 1, 1), np.float32)
    for options in ({"scale": kind(0.5)}, {"scale": 0.5, "logits_soft_cap": kind(2)}):
        _, lse = attention(ones, ones, ones, masks.full(1), return_residual=True, **options)
        want = 2 * np.tanh(0.25) if "logits_soft_cap" in options else 0.5
        np.testing.assert_allclose(lse.item(), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": "8"}, r"num_heads must be an integer, but it is '8'"),
        ({"num_heads": -8}, r"num_heads must be between 1 and 1073741824, but it is -8"),
        ({"head_dim": np.nan}, r"head_dim must be an integer, but it is nan"),
        ({"head_dim": 64.0}, r"head_dim must be an integer, but it is 64\.0"),
        ({"mask": None}, r"mask must be an AttnMask, but is NoneType"),
        ({"mode": []}, r'mode must be "fwd" or "bwd", but is \[\]'),
    ],
)
def test_flops(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flops(**({"mask": masks.causal(4), "num_heads": 8, "head_dim": 64} | arguments))


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_numbers_are_static(name: str) -> None:
    def call(number: Any) -> Any:
        arguments: Any = GOOD | {name: number}
        return attention(**arguments)

    with pytest.raises(ValueError, match=rf"^{name} is static, .* but it is traced: .*float32"):
        jax.jit(call)(1.0)


@pytest.mark.parametrize("compile_", [lambda function: function, jax.jit])
def test_margin_on_the_cpu(implementation: str, compile_: Any) -> None:
    """Nothing there could leave multiprocessors free."""
    attend = compile_(lambda query: attention(**(GOOD | options | {"query": query})))
    options = {"implementation": implementation, "sm_margin": 2}
    message = r"sm_margin=2: only the kernels for GPUs .*, on platform cpu, jaxmagi_attention_forward runs"
    with pytest.raises(NotImplementedError, match=message):
        attend(GOOD["query"])


def test_differentiable_once_in_reverse_mode(implementation: str) -> None:
    def loss(query: jax.Array) -> jax.Array:
        key, value, mask = GOOD["key"], GOOD["value"], GOOD["mask"]
        return (attention(query, key, value, mask, implementation=implementation) ** 2).sum()

    query = GOOD["query"]
    with pytest.raises(NotImplementedError, match=r"once and in reverse mode.*no second derivatives"):
        jax.grad(lambda query: jax.grad(loss)(query).sum())(query)
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\)"):
        jax.jvp(loss, (query,), (query,))


FORWARD = {
    "q": zeros(2, 8, 4, 16),
    "k": zeros(2, 9, 2, 16),
    "v": zeros(2, 9, 2, 12),
    "bands": zeros(1, 8, 6, dtype=jnp.int32),
    "sinks": zeros(4),
    "scale": 1.0,
    "soft_cap": 0.0,
    "out_dtype": jnp.float32,
    "implementation": "xla",
}
BACKWARD = {name: x for name, x in FORWARD.items() if name not in ("sinks", "out_dtype")} | {
    "dout": zeros(2, 8, 4, 12),
    "lse": zeros(2, 8, 4),
    "delta": zeros(2, 8, 4),
    "deterministic": False,
    "grad_dtype": jnp.float32,
}


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"q": zeros(8, 4, 16)},
            r"key must be \[\*B, T, N, D\], like query \(8, 4, 16\), but has shape \(2,",
        ),
        ({"q": zeros(2, 8, 3, 16)}, r"query heads 3 is no multiple of that of key heads 2"),
        ({"q": zeros(2, 8, 4, 16, dtype=jnp.int32)}, r"dtype of query must be one of .*int32"),
        ({"k": zeros(2, 9, 2, 15)}, r"key must be float32\[2, 9, 2, 16\], but is float32\[2, 9, 2, 15\]"),
        ({"v": zeros(1, 9, 2, 12)}, r"must be float32\[2, 9, 2, 12\]"),
        (
            {"bands": zeros(3, 8, 6, dtype=jnp.int32)},
            r"int32\[2, C, 6\], or with 1 for a batch dimension that shares.*int32\[3, 8, 6\]",
        ),
        ({"bands": zeros(1, 8, 6)}, r"bands must be .*float32\[1, 8, 6\]"),
        ({"sinks": zeros(4, dtype=jnp.bfloat16)}, r"sinks must be float32\[4\], but is bfloat16\[4\]"),
        ({"out_dtype": jnp.bfloat16}, r"out_dtype must be float32 for operands in float32.*bfloat16"),
        ({"q": zeros(2, 8, 0, 16)}, r"There must be heads, but query has 0 and key has 2"),
        ({"k": zeros(2, 9, 0, 16), "v": zeros(2, 9, 0, 12)}, r"There must be heads, but .* key has 0"),
        ({"soft_cap": -1.0}, r"soft_cap must be a positive normal float32, or 0 for none, but is -1\.0"),
        ({"soft_cap": np.inf}, r"soft_cap must be .*inf"),
        ({"soft_cap": 1e-50}, r"soft_cap must be .*1e-50"),
        ({"implementation": "triton"}, r"implementation must be one of .*'triton'"),
    ],
)
def test_forward_primitive(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_forward(**(FORWARD | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dout": zeros(2, 8, 4, 16)}, r"dout must be float32\[2, 8, 4, 12\], but is float32\[2, 8, 4, 16\]"),
        ({"lse": zeros(2, 8, 2)}, r"lse must be float32\[2, 8, 4\], but is float32\[2, 8, 2\]"),
        ({"delta": zeros(2, 4, 8)}, r"delta must be float32\[2, 8, 4\], but is float32\[2, 4, 8\]"),
        ({"grad_dtype": jnp.float16}, r"grad_dtype must be float32 .*float16"),
        ({"k": zeros(2, 9, 0, 16), "v": zeros(2, 9, 0, 12)}, r"There must be heads, but .* key has 0"),
        ({"soft_cap": np.nan}, r"soft_cap must be .*nan"),
    ],
)
def test_backward_primitive(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_backward(**(BACKWARD | change))
