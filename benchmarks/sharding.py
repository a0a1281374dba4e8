"""Training steps of a decoder that the compiler spreads over GPUs, by the batch or by heads, in one run.

    python -m benchmarks.sharding [--gpus 2] [--tokens 16384] [--batch 2] [--layers 4] [--width 2048]
                                  [--repeats 5] [--rows REGEX] [--out FOLDER]

Loss, gradients and AdamW of a decoder with 16 query heads and 4 key heads, under a plain `jax.jit`. All axes
of the mesh are Auto: parameters and batch have shardings, and XLA's partitioner does the rest.

    one GPU             --batch examples of --tokens tokens
    batch over N GPUs   as many examples on each GPU; each has all parameters
    heads over N GPUs   the examples of one GPU on all of them; parameters in the layout of Megatron

Masks are packed causal documents (lengths from tests/data/document_lengths.csv), the same in each example,
and plain causal. The peer is cuDNN by `jax.nn.dot_product_attention`, under the causal mask alone: that
function has no arguments for packed documents.

Before a step runs, its compiled text tells the collectives, and nothing of attention may be gathered. Time is
that of several steps put into the devices' queues at once; all rows of a mask are measured in turns. A ratio
is that to the tokens per second of one GPU with the same mask and implementation.

With --out, writes sharding_h200.json there after each mask.
"""

import argparse
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.sharding import AxisType, Mesh

from benchmarks._decoder import DATA, TENSOR, Batch, Sizes, State, compile_step, draw_batch, initial_state
from benchmarks._measure import gpu_environment, save
from benchmarks._requirements import Check, check, show_checks
from benchmarks._rows import Failure
from jaxmagi import AttnMask, attention, masks
from jaxmagi.calibration._timing import DeviceWork, Timing, time_in_turns
from tests.cases import document_lengths
from tests.compiled import collective_names, collectives

HEADS, KEY_HEADS, VOCABULARY = 16, 4, 32_768
DOCUMENTS, CAUSAL = "documents", "causal"
OURS, CUDNN = "jaxmagi", "cuDNN"
ONE_GPU = "one GPU"
DIRECTION = "training step"
STEPS = 8  # put into the queues at once
AT_LEAST = {"batch over 2 GPUs": 1.9, "heads over 2 GPUs": 1.6}
"""Required ratios, by set-up."""

MASKS: dict[str, Callable[[int], AttnMask]] = {
    DOCUMENTS: lambda length: masks.documents(document_lengths(length)),
    CAUSAL: masks.causal,
}


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, mask: AttnMask) -> jax.Array:
    """Attends under the causal mask, whichever is given."""
    del mask
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


ATTENTION: dict[str, Callable[..., jax.Array]] = {OURS: attention, CUDNN: _cudnn}
IMPLEMENTATIONS = {DOCUMENTS: (OURS,), CAUSAL: (OURS, CUDNN)}
"""The implementations that are measured under each mask."""


@dataclass(frozen=True)
class Setup:
    """Says how many devices the batch and the heads are split over, and the examples of all devices."""

    name: str
    data: int
    tensor: int
    examples: int

    def mesh(self) -> Mesh:
        devices = jax.devices()[: self.data * self.tensor]
        kinds = (AxisType.Auto, AxisType.Auto)
        return jax.make_mesh((self.data, self.tensor), (DATA, TENSOR), kinds, devices=devices)


def setups(gpus: int, batch: int) -> list[Setup]:
    """Makes all set-ups for so many GPUs, and so many examples for one."""
    spread = [
        Setup(f"batch over {gpus} GPUs", gpus, 1, gpus * batch),
        Setup(f"heads over {gpus} GPUs", 1, gpus, batch),
    ]
    return [Setup(ONE_GPU, 1, 1, batch), *(spread if gpus > 1 else [])]


@dataclass(frozen=True)
class Case:
    """Names a training step to be measured."""

    mask: str
    setup: Setup
    implementation: str

    @property
    def workload(self) -> str:
        return f"{self.mask}, {self.setup.name}"

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.implementation}"


@dataclass
class Trainer:
    """Holds a compiled training step and its state, which each step donates and replaces."""

    case: Case
    program: jax.stages.Compiled
    state: State
    batch: Batch
    text: str | None
    first_loss: float

    def step(self) -> jax.Array:
        """Enqueues a step and returns its loss."""
        self.state, loss = self.program(self.state, self.batch)
        return loss

    def seconds(self) -> float:
        """Returns the time of a step."""
        work = DeviceWork(self.step, jax.block_until_ready, passes=1)
        return work.seconds(STEPS) / STEPS


def make_trainer(case: Case, mask: AttnMask, sizes: Sizes) -> Trainer:
    """Compiles the training step of a case and runs it once."""
    mesh = case.setup.mesh()
    state, batch = initial_state(sizes, mesh), draw_batch(sizes, mesh, case.setup.examples, mask)
    program = compile_step(ATTENTION[case.implementation], state, batch)
    text = program.as_text()
    state, loss = program(state, batch)
    return Trainer(case, program, state, batch, text, float(loss))


@dataclass(frozen=True)
class Row:
    """Holds what was measured of a training step.

    tokens: of all GPUs.
    loss: of the first step.
    ratio: to the tokens per second of one GPU; None where that was not measured.
    collectives: how many arrays those of each name move.
    gathered: collectives that may have gathered something of attention, by the function of this name.
    """

    workload: str
    direction: str
    implementation: str
    tokens: int
    loss: float
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    tokens_per_second: float
    ratio: float | None
    collectives: dict[str, int]
    gathered: dict[str, int]


def gathered(found: Counter[str], tokens: int) -> dict[str, int]:
    """Returns the collectives that may have gathered something of attention, with what a device gets.

    They add nothing up and have at least one number for each token of an example, like a head's log-sum-exp.
    """
    return {
        name: count
        for name, count in found.items()
        if not name.startswith(("all-reduce", "reduce-scatter"))
        and math.prod(map(int, re.findall(r"\d+", name.partition("[")[2]))) >= tokens
    }


def measure(mask: str, tokens: int, cases: Iterable[Case], sizes: Sizes, repeats: int) -> list[Row | Failure]:
    """Returns the rows of some cases with one mask, and those that failed."""
    trainers, failures = {}, []
    for case in cases:
        try:
            trainers[case.name] = make_trainer(case, MASKS[mask](tokens), sizes)
        except Exception as error:
            failures.append(Failure.of(case.workload, DIRECTION, case.implementation, error))
    for trainer in trainers.values():
        trainer.seconds()  # the first time so many steps are under way takes longer
    timings = time_in_turns(trainers, repeats, lambda name: trainers[name].seconds())
    return [*to_rows(trainers, timings), *failures]


def to_rows(trainers: dict[str, Trainer], timings: dict[str, Timing]) -> list[Row]:
    """Makes the rows of cases with one mask."""
    rates = {name: trainer.batch.tokens.size / timings[name].median for name, trainer in trainers.items()}
    return [to_row(trainer, timings[name], rates) for name, trainer in trainers.items()]


def to_row(trainer: Trainer, timing: Timing, rates: dict[str, float]) -> Row:
    """Makes a row, given the tokens per second of all cases."""
    case, rate = trainer.case, rates[trainer.case.name]
    one_gpu = rates.get(f"{case.mask}, {ONE_GPU}, {case.implementation}")
    median, fastest, slowest = (1e3 * x for x in (timing.median, timing.fastest, timing.slowest))
    return Row(
        workload=case.workload,
        direction=DIRECTION,
        implementation=case.implementation,
        tokens=trainer.batch.tokens.size,
        loss=trainer.first_loss,
        median_ms=median,
        fastest_ms=fastest,
        slowest_ms=slowest,
        tokens_per_second=rate,
        ratio=rate / one_gpu if one_gpu else None,
        collectives=dict(collective_names(trainer.text)),
        gathered=gathered(collectives(trainer.text), trainer.batch.mask.q_len),
    )


def show(rows: Iterable[Row | Failure]) -> None:
    for row in rows:
        label = f"{row.workload:31s} {row.implementation:8s}"
        if isinstance(row, Failure):
            print(label, "failed:", row.error.splitlines()[0], flush=True)
            continue
        spread = f"({row.fastest_ms:.1f} to {row.slowest_ms:.1f})"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f} x one GPU"
        moved = ", ".join(f"{count} {name}" for name, count in row.collectives.items())
        rate = f"{row.tokens_per_second:9.0f} tokens/s"
        print(f"{label} {row.median_ms:8.1f} ms {spread:18s} {rate}  {ratio:15s}  {moved}", flush=True)


def checks(rows: Iterable[Row | Failure]) -> list[Check]:
    """Ours has to gather nothing, and on two GPUs to be so many times as fast as on one."""
    made = []
    for row in rows:
        _, _, setup = row.workload.partition(", ")
        if row.implementation != OURS or setup == ONE_GPU:
            continue
        ratio, count = (row.ratio, sum(row.gathered.values())) if isinstance(row, Row) else (None, None)
        made.append(check(row.workload, DIRECTION, "required", "arrays gathered", count, at_most=0))
        if setup in AT_LEAST:
            least = AT_LEAST[setup]
            made.append(check(row.workload, DIRECTION, "required", ONE_GPU, ratio, at_least=least))
    return made


def run(arguments: argparse.Namespace) -> None:
    """Measures what the pattern selects; saves after each mask, so that a run cut short leaves something."""
    start = time.perf_counter()
    sizes = Sizes(arguments.layers, arguments.width, HEADS, KEY_HEADS, VOCABULARY)
    about = gpu_environment() | {"tokens": arguments.tokens, "examples": arguments.batch} | asdict(sizes)
    results: list[Row | Failure] = []
    for mask in MASKS:
        cases = [
            Case(mask, setup, implementation)
            for implementation in IMPLEMENTATIONS[mask]
            for setup in setups(arguments.gpus, arguments.batch)
        ]
        chosen = [case for case in cases if re.search(arguments.rows, case.name)]
        measured = measure(mask, arguments.tokens, chosen, sizes, arguments.repeats)
        show(measured)
        results += measured
        print(f"[{time.perf_counter() - start:.0f} s]", flush=True)
        if arguments.out:
            save("sharding_h200", [*results, *checks(results)], arguments.out, **about)
    show_checks(checks(results))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2, help="that the batch and the heads are spread over")
    parser.add_argument("--tokens", type=int, default=16_384, help="of an example")
    parser.add_argument("--batch", type=int, default=2, help="examples on one GPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048, help="of the residual stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rows", default="", metavar="REGEX", help='only those it finds in "causal, one GPU, cuDNN" ...'
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON there")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
