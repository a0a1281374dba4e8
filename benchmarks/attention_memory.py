"""Measures the peak memory of the forward and backward pass on a GPU at 131072 tokens.

    python -m benchmarks.attention_memory [--out FOLDER]

The mask is packed causal documents, in bfloat16 with batch 1, 64 query heads, 8 key heads and head dimension
128. Needed are the operands, the cotangent, the output, the gradients, and the query's gradient once in
float32, for it is summed there; required is a peak of at most 1.05 times that. Those of keys and values,
which the kernels sum in float32 too if many query heads share a key head, do not count as needed. With --out,
writes attention_memory_CARD.json there, where CARD is h200 for instance.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._measure import card, gpu_environment, save
from benchmarks._workloads import HEADS, KV_HEADS, Documents, Workload
from benchmarks.attention_cpu import forward_and_backward, ours
from tests.cases import document_lengths

LENGTH = 131_072
REPEATED = 64
AT_MOST = 1.05


@dataclass(frozen=True)
class Row:
    """The bytes of one workload.

    peak: the most that JAX held on the device at one time, operands included.
    compiled: what the compiler set aside for operands, results and temporary arrays.
    """

    workload: str
    direction: str
    operands: int
    outputs: int
    gradients: int
    float32_dq: int
    needed: int
    compiled: int
    peak: int
    ratio: float
    at_most: float
    met: bool

    def __str__(self) -> str:
        names = ("operands", "outputs", "gradients", "float32_dq", "needed", "compiled", "peak")
        lines = [f"{name:11s} {getattr(self, name) / 1e9:8.3f} GB" for name in names]
        verdict = "met" if self.met else "missed"
        ratio = f"peak over needed {self.ratio:.4f}, required at most {self.at_most}: {verdict}"
        return "\n".join([*lines, ratio])


@functools.partial(jax.jit, static_argnames=("length", "heads", "dim"))
def _normal(key: jax.Array, length: int, heads: int, dim: int) -> jax.Array:
    """Draws unit-normal numbers, repeated: to draw all would take more memory than what is measured."""
    part = jax.random.normal(key, (1, length // REPEATED, heads, dim), jnp.bfloat16)
    return jnp.tile(part, (1, REPEATED, 1, 1))


def operands(workload: Workload) -> list[jax.Array]:
    """Draws query, key, value and cotangent, [1, length, heads, dim], of a multiple of 64 tokens."""
    dim, v_dim = workload.dim, workload.v_dim
    shapes = ((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, v_dim), (HEADS, v_dim))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    length = workload.pattern.length
    return [_normal(key, length, heads, dim) for key, (heads, dim) in zip(keys, shapes, strict=True)]


def compile_step(workload: Workload, operands: Sequence[jax.Array]) -> Any:
    """Compiles both passes into one program, which returns the output and the gradients."""
    step = forward_and_backward(ours(workload.pattern.mask(), "ffi"))
    return jax.jit(step).lower(*operands).compile()


def compiled_bytes(step: Any) -> int:
    sizes = step.memory_analysis()
    parts = (sizes.argument_size_in_bytes, sizes.output_size_in_bytes, sizes.temp_size_in_bytes)
    return sum(parts) - sizes.alias_size_in_bytes


def peak_bytes() -> int:
    """Returns the most that JAX has held on the device; raises RuntimeError where it does not count."""
    statistics = jax.devices()[0].memory_stats()
    if statistics is None:
        raise RuntimeError(f"{jax.devices()[0].device_kind} does not count its memory")
    return statistics["peak_bytes_in_use"]


def to_row(workload: Workload, operands: Sequence[jax.Array], compiled: int, peak: int) -> Row:
    query, *_, cotangent = operands
    given, outputs, float32_dq = sum(x.nbytes for x in operands), cotangent.nbytes, 4 * query.size
    gradients = given - outputs
    needed = given + outputs + gradients + float32_dq
    return Row(
        workload.name,
        "forward + backward",
        operands=given,
        outputs=outputs,
        gradients=gradients,
        float32_dq=float32_dq,
        needed=needed,
        compiled=compiled,
        peak=peak,
        ratio=peak / needed,
        at_most=AT_MOST,
        met=peak <= AT_MOST * needed,
    )


def measure(workload: Workload) -> Row:
    """Runs both passes once; raises RuntimeError if making the operands took more memory than that."""
    arrays = jax.block_until_ready(operands(workload))
    before = peak_bytes()
    step = compile_step(workload, arrays)
    jax.block_until_ready(step(*arrays))
    peak = peak_bytes()
    if peak <= before:
        raise RuntimeError(f"the peak of {peak} bytes is that of making the operands")
    return to_row(workload, arrays, compiled_bytes(step), peak)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON there")
    arguments = parser.parse_args()
    documents = Documents(tuple(document_lengths(LENGTH)), causal=True)
    row = measure(Workload(f"documents causal, {LENGTH} tokens", documents))
    print(row)
    if arguments.out:
        print("saved", save(f"attention_memory_{card()}", [row], arguments.out, **gpu_environment()))


if __name__ == "__main__":
    main()
