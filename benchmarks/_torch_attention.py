"""Attention in PyTorch, as work to be timed: cuDNN, FlexAttention and FlashAttention-4.

PyTorch and FlashAttention-4 (the package flash-attn-4) are no dependencies: what is not installed raises
ModuleNotFoundError.
"""

# pyright: reportMissingImports=false

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._measure import DeviceWork, package_version
from benchmarks._workloads import (
    HEADS,
    KV_HEADS,
    Causal,
    Documents,
    Full,
    Pattern,
    SharedPrefix,
    Video,
    Window,
    Workload,
)


@functools.lru_cache(maxsize=1)
def inputs(workload: Workload, layers: int) -> tuple[list[Any], Any, Any]:
    """Unit-normal queries, one for each layer, key and value, [length, heads, dim] in bfloat16."""
    import torch

    def normal(heads: int, dim: int) -> Any:
        shape = (workload.pattern.length, heads, dim)
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    queries = [normal(HEADS, workload.dim) for _ in range(layers)]
    return queries, normal(KV_HEADS, workload.dim), normal(KV_HEADS, workload.v_dim)


def _by_layer(forward: Callable[[Any], Any], queries: list[Any], *, captured: bool) -> DeviceWork:
    """All layers; short ones as a CUDA graph, for Python takes longer than they do."""
    import torch

    def layers() -> None:
        for query in queries:
            forward(query)

    def wait(_: None) -> None:
        torch.cuda.synchronize()

    if not captured:
        return DeviceWork(layers, wait, len(queries))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return DeviceWork(graph.replay, wait, len(queries))


def _heads_first(x: Any) -> Any:
    """[length, heads, dim] → [1, heads, length, dim], the layout that PyTorch expects, without a copy."""
    return x.transpose(0, 1)[None]


def cudnn(workload: Workload, layers: int) -> DeviceWork:
    """`scaled_dot_product_attention` on its cuDNN backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    queries, key, value = inputs(workload, layers)
    key, value = _heads_first(key), _heads_first(value)
    is_causal = isinstance(workload.pattern, Causal)

    def forward(query: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                _heads_first(query), key, value, is_causal=is_causal, enable_gqa=True
            )

    return _by_layer(forward, queries, captured=workload.is_short)


def _segments(lengths: list[int]) -> Any:
    import torch

    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()


def _mask_mod(pattern: Pattern) -> Callable[..., Any]:
    """The pattern as FlexAttention takes it: whether query i sees key j."""
    match pattern:
        case Full():
            return lambda b, h, i, j: j >= 0
        case Causal():
            return lambda b, h, i, j: i >= j
        case Documents(lengths, causal):
            document = _segments(list(lengths))
            if causal:
                return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
            return lambda b, h, i, j: document[i] == document[j]
        case Window(_, left):
            return lambda b, h, i, j: (i >= j) & (i - j <= left)
        case SharedPrefix(prefix, branches, size):
            branch = _segments([prefix] + [size] * branches)
            return lambda b, h, i, j: ((branch[i] == branch[j]) | (branch[j] == 0)) & (i >= j)
        case Video(_, size):
            return lambda b, h, i, j: j // size <= i // size


def flex(workload: Workload, layers: int) -> DeviceWork:
    """FlexAttention, compiled; the block mask is made beforehand (uncompiled, which is quicker once)."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    queries, key, value = inputs(workload, layers)
    key, value = _heads_first(key), _heads_first(value)
    length = workload.pattern.length
    block_mask = create_block_mask(_mask_mod(workload.pattern), None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward(query: Any) -> Any:
        return compiled(_heads_first(query), key, value, block_mask=block_mask, enable_gqa=True)

    return _by_layer(forward, queries, captured=workload.is_short)


def flash_attention_4(workload: Workload, layers: int) -> DeviceWork:
    """FlashAttention-4 for Hopper: dense, windows, and documents as sequences of variable length."""
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    queries, key, value = inputs(workload, layers)
    pattern = workload.pattern
    if isinstance(pattern, Documents):
        ends = np.cumsum([0, *pattern.lengths])
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        longest = max(pattern.lengths)
        forward = functools.partial(
            flash_attn_varlen_func,
            k=key,
            v=value,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=pattern.causal,
        )
        return _by_layer(forward, queries, captured=workload.is_short)
    options: dict[str, Any] = {"causal": not isinstance(pattern, Full)}
    if isinstance(pattern, Window):
        options["window_size"] = (pattern.left, 0)
    dense = functools.partial(flash_attn_func, k=key[None], v=value[None], **options)
    return _by_layer(lambda query: dense(query[None]), queries, captured=workload.is_short)


def candidates(workload: Workload) -> dict[str, Callable[[Workload, int], DeviceWork]]:
    """Which of them can express the workload, by name. FlexAttention is for the masks that cuDNN lacks."""
    dense = isinstance(workload.pattern, Full | Causal)
    found = {"cuDNN": cudnn} if dense else {"FlexAttention": flex}
    if not isinstance(workload.pattern, SharedPrefix | Video):
        found["FlashAttention-4"] = flash_attention_4
    return found


def versions() -> dict[str, str | None]:
    """None for what is not installed."""
    return {name: package_version(name) for name in ("torch", "flash-attn-4")} | {"cudnn": _cudnn_version()}


def _cudnn_version() -> str | None:
    """Of the cuDNN that PyTorch uses."""
    if not importlib.util.find_spec("torch"):
        return None
    import torch

    return str(torch.backends.cudnn.version())
