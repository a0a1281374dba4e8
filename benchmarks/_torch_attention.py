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

from benchmarks._jax_attention import MakeWork
from benchmarks._measure import package_version
from benchmarks._workloads import (
    HEADS,
    KV_HEADS,
    Causal,
    Direction,
    Documents,
    Full,
    Pattern,
    SharedPrefix,
    Video,
    Window,
    Workload,
)
from jaxmagi.calibration._timing import DeviceWork

type Attend = Callable[[Any, Any, Any], Any]
"""Takes query, key and value [length, heads, dim]; the output has the layout that suits the library."""
type MakeAttend = Callable[[Workload], Attend]
MOST_UNCOMPILED_ROWS = 2**15  # of a mask of FlexAttention, 8 GB of cells


@functools.lru_cache(maxsize=1)
def inputs(workload: Workload, layers: int) -> list[Any]:
    """Draws unit-normal queries, one for each layer, then key and value, [length, heads, dim] in bfloat16."""
    import torch

    def normal(heads: int, dim: int) -> Any:
        shape = (workload.pattern.length, heads, dim)
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    queries = [normal(HEADS, workload.dim) for _ in range(layers)]
    return [*queries, normal(KV_HEADS, workload.dim), normal(KV_HEADS, workload.v_dim)]


def _forward(make: MakeAttend, workload: Workload, layers: int) -> DeviceWork:
    """Makes the work of the forward pass of all layers."""
    attend = make(workload)
    *queries, key, value = inputs(workload, layers)

    def run() -> None:
        for query in queries:
            attend(query, key, value)

    return _work(lambda: run, layers, captured=workload.is_short)


def _backward(make: MakeAttend, workload: Workload, layers: int) -> DeviceWork:
    """Makes the work of the gradients of all layers, of outputs that are made before."""
    import torch

    attend = make(workload)
    *queries, key, value = (x.detach().requires_grad_() for x in inputs(workload, layers))

    def after_forward() -> Callable[[], None]:
        outs = [attend(query, key, value) for query in queries]
        cotangent = torch.randn_like(outs[0])

        def run() -> None:
            for query, out in zip(queries, outs, strict=True):
                torch.autograd.grad(out, (query, key, value), cotangent, retain_graph=True)

        return run

    return _work(after_forward, layers, captured=workload.is_short)


def _work(prepare: Callable[[], Callable[[], None]], layers: int, *, captured: bool) -> DeviceWork:
    """Makes work of what ``prepare`` returns, as a CUDA graph where Python takes longer than the layers.

    Autograd runs in the stream of the forward pass, so what goes into a graph is prepared in the stream of
    the graph.
    """
    import torch

    def in_queue(run: Callable[[], None]) -> DeviceWork:
        def enqueue() -> torch.cuda.Event:
            run()
            event = torch.cuda.Event()
            event.record()
            return event

        return DeviceWork(enqueue, lambda event: event.synchronize(), layers)

    if not captured:
        return in_queue(prepare())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run = prepare()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replay(held: Callable[[], None] = run) -> None:
        """Replays the graph; ``held`` has the tensors that it reads."""
        graph.replay()

    return in_queue(replay)


def _heads_first(x: Any) -> Any:
    """Makes [1, heads, length, dim], the layout that PyTorch expects, of [length, heads, dim], no copy."""
    return x.transpose(0, 1)[None]


def cudnn(workload: Workload) -> Attend:
    """Returns `scaled_dot_product_attention` on its cuDNN backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    is_causal = isinstance(workload.pattern, Causal)

    def attend(*operands: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                *map(_heads_first, operands), is_causal=is_causal, enable_gqa=True
            )

    return attend


def _segments(lengths: list[int]) -> Any:
    import torch

    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()


def _mask_mod(pattern: Pattern) -> Callable[..., Any]:
    """Returns the pattern as FlexAttention takes it: whether query i sees key j."""
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


def flex(workload: Workload, backend: str) -> Attend:
    """Returns compiled FlexAttention on a backend; the block mask is made before.

    The backends are "TRITON" and, with the kernels of FlashAttention-4, "FLASH". Making the mask is quicker
    uncompiled, but holds all of its cells.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # or an output could be differentiated only once
    length = workload.pattern.length
    make_mask = torch.compile(create_block_mask) if length > MOST_UNCOMPILED_ROWS else create_block_mask
    block_mask = make_mask(_mask_mod(workload.pattern), None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(*operands: Any) -> Any:
        return compiled(
            *map(_heads_first, operands),
            block_mask=block_mask,
            enable_gqa=True,
            kernel_options={"BACKEND": backend},
        )

    return attend


def flash_attention_4(workload: Workload) -> Attend:
    """Returns FlashAttention-4 for Hopper; it takes documents as sequences of variable length."""
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    pattern = workload.pattern
    if isinstance(pattern, Documents):
        ends = np.cumsum([0, *pattern.lengths])
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        options: dict[str, Any] = {f"cu_seqlens_{x}": offsets for x in "qk"}
        options |= {f"max_seqlen_{x}": max(pattern.lengths) for x in "qk"}
        return lambda *operands: _output(flash_attn_varlen_func(*operands, causal=pattern.causal, **options))
    options = {"causal": not isinstance(pattern, Full)}
    if isinstance(pattern, Window):
        options["window_size"] = (pattern.left, 0)
    return lambda *operands: _output(flash_attn_func(*(x[None] for x in operands), **options))


def _output(result: Any) -> Any:
    """Drops the log-sum-exp, which some versions return too."""
    return result[0] if isinstance(result, tuple) else result


def candidates(workload: Workload, direction: Direction) -> dict[str, MakeWork]:
    """Returns what can express the workload, by name.

    FlexAttention is for the masks that cuDNN lacks, and for the causal one.
    """
    found: dict[str, MakeAttend] = {}
    if isinstance(workload.pattern, Full | Causal):
        found["cuDNN"] = cudnn
    if not isinstance(workload.pattern, Full):
        found["FlexAttention"] = functools.partial(flex, backend="TRITON")
        found["FlexAttention FLASH"] = functools.partial(flex, backend="FLASH")
    if not isinstance(workload.pattern, SharedPrefix | Video):
        found["FlashAttention-4"] = flash_attention_4
    run = _forward if direction == "forward" else _backward
    return {name: functools.partial(run, make) for name, make in found.items()}


def versions() -> dict[str, str | None]:
    """Returns the versions of PyTorch, FlashAttention-4 and cuDNN; None for what is not installed."""
    return {name: package_version(name) for name in ("torch", "flash-attn-4")} | {"cudnn": _cudnn_version()}


def _cudnn_version() -> str | None:
    """Returns the version of the cuDNN that PyTorch uses."""
    if not importlib.util.find_spec("torch"):
        return None
    import torch

    return str(torch.backends.cudnn.version())
