"""Times attention on the CPU and `jax.nn.dot_product_attention`, and tells peak memory at 131072 tokens.

    uv run python -m benchmarks.attention_cpu [--repeats 9] [--save]

All run in turns, in float32 with T = 4096, 8 heads, D = 64. jax.nn gets ``is_causal=True`` for the causal
mask and a dense boolean mask for packed documents, which it has no other way to express.
"""

import argparse
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._measure import save, time_interleaved
from benchmarks._report import in_unit
from jaxmagi import AttnMask, attention, masks

LENGTH, HEADS, HEAD_DIM = 4096, 8, 64
DOCUMENT = 512
LONG_LENGTH, LONG_DOCUMENT = 131_072, 2048


@dataclass(frozen=True)
class Row:
    """The time that an implementation takes for a mask and direction; the speed-up is that over jax.nn."""

    mask: str
    direction: str
    implementation: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    speedup: float

    def __str__(self) -> str:
        label = f"{self.mask:18s} {self.direction:18s} {self.implementation:7s}"
        spread = f"({self.fastest_ms:.1f} to {self.slowest_ms:.1f})"
        return f"{label} {self.median_ms:8.1f} ms {spread}  {self.speedup:5.2f} x jax.nn"


def inputs(length: int, heads: int, head_dim: int) -> list[jax.Array]:
    """Draws unit-normal query, key, value and cotangent, ``[length, heads, head_dim]`` float32."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((length, heads, head_dim), np.float32)) for _ in range(4)]


def forward_and_backward(forward: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        out, vjp = jax.vjp(forward, query, key, value)
        return out, vjp(cotangent)

    return run


def ours(mask: AttnMask, implementation: str) -> Callable[..., jax.Array]:
    return lambda query, key, value: attention(query, key, value, mask, implementation=implementation)


def peer(mask: AttnMask, is_causal: bool) -> Callable[..., jax.Array]:
    if is_causal:
        return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    dense = jnp.asarray(mask.to_dense())[None, None]
    return functools.partial(jax.nn.dot_product_attention, mask=dense, implementation="xla")


def compare(name: str, mask: AttnMask, repeats: int) -> list[Row]:
    """Times ours ("ffi", "xla") and jax.nn's, forward and forward + backward."""
    arrays = inputs(LENGTH, HEADS, HEAD_DIM)
    candidates = {"ffi": ours(mask, "ffi"), "xla": ours(mask, "xla"), "jax.nn": peer(mask, name == "causal")}
    rows = []
    for direction in ("forward", "forward + backward"):
        if direction == "forward":
            functions, operands = candidates, arrays[:3]
        else:
            functions, operands = {k: forward_and_backward(f) for k, f in candidates.items()}, arrays
        calls = {key: functools.partial(jax.jit(each), *operands) for key, each in functions.items()}
        timings = time_interleaved(calls, repeats)
        base = timings["jax.nn"].median
        rows += [
            Row(name, direction, key, **in_unit(timing, "ms"), speedup=base / timing.median)
            for key, timing in timings.items()
        ]
    return rows


def long_sequence(implementation: str) -> None:
    """Runs both passes at 131072 tokens, one head, documents of 2048; prints the peak memory in GB."""
    mask = masks.documents([LONG_DOCUMENT] * (LONG_LENGTH // LONG_DOCUMENT))
    function = jax.jit(forward_and_backward(ours(mask, implementation)))
    jax.block_until_ready(function(*inputs(LONG_LENGTH, 1, HEAD_DIM)))
    # Not getrusage: its peak is that of the parent, where the process was forked from a larger one.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak) * 1024 / 1e9)


def peak_memory(implementation: str) -> dict[str, Any]:
    """Runs `long_sequence` in a separate process, so that the peak is that of this run alone."""
    command = [sys.executable, "-m", "benchmarks.attention_cpu", "--long-sequence", implementation]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {
        "mask": f"{LONG_LENGTH // LONG_DOCUMENT} documents of {LONG_DOCUMENT}, one head",
        "direction": "forward + backward",
        "implementation": implementation,
        "peak_gb": float(out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/attention_cpu.json")
    parser.add_argument("--long-sequence", metavar="IMPLEMENTATION", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if arguments.long_sequence:
        return long_sequence(arguments.long_sequence)
    documents = masks.documents([DOCUMENT] * (LENGTH // DOCUMENT))
    rows = compare("causal", masks.causal(LENGTH), arguments.repeats)
    rows += compare(f"documents of {DOCUMENT}", documents, arguments.repeats)
    print(*rows, sep="\n")
    memory = [peak_memory(implementation) for implementation in ("ffi", "xla")]
    for peak in memory:
        print(f"{peak['mask']}, {peak['direction']}, {peak['implementation']}: peak {peak['peak_gb']:.2f} GB")
    if arguments.save:
        print("saved", save("attention_cpu", [*rows, *memory]))


if __name__ == "__main__":
    main()
