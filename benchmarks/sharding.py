"""Times training steps of a decoder that the compiler spreads over GPUs, by the batch or by heads.

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

--rows is matched with "causal, one GPU, cuDNN" and the like. With --out, writes sharding.json there after
each mask.
"""

import argparse
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import jax
from jax.sharding import AxisType

from benchmarks._decoder import DATA, TENSOR, Sizes, compile_step, draw_batch, initial_state
from benchmarks._measure import gpu_environment
from benchmarks._report import Check, Failure, Report, Result, argument_parser, check, in_unit, make_each
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
class Case:
    """A training step: how many devices split its batch and its heads, and the examples of all devices."""

    mask: str
    setup: str
    implementation: str
    data: int
    tensor: int
    examples: int

    @property
    def workload(self) -> str:
        return f"{self.mask}, {self.setup}"

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.implementation}"


def cases(mask: str, gpus: int, batch: int) -> list[Case]:
    """Returns all cases with a mask for so many GPUs, and so many examples for one."""
    setups = [(ONE_GPU, 1, 1, batch)]
    if gpus > 1:
        setups += [
            (f"batch over {gpus} GPUs", gpus, 1, gpus * batch),
            (f"heads over {gpus} GPUs", 1, gpus, batch),
        ]
    return [Case(mask, name, each, *sizes) for each in IMPLEMENTATIONS[mask] for name, *sizes in setups]


class Trainer:
    """A compiled training step and its state, which each step donates and replaces."""

    def __init__(self, case: Case, tokens: int, sizes: Sizes) -> None:
        """Compiles the step of a case, with so many tokens in an example, and runs it once."""
        self.case = case
        shape, kinds = (case.data, case.tensor), (AxisType.Auto, AxisType.Auto)
        mesh = jax.make_mesh(shape, (DATA, TENSOR), kinds, devices=jax.devices()[: math.prod(shape)])
        self._state = initial_state(sizes, mesh)
        self.batch = draw_batch(sizes, mesh, case.examples, MASKS[case.mask](tokens))
        self._program = compile_step(ATTENTION[case.implementation], self._state, self.batch)
        self.text = self._program.as_text()
        self.first_loss = float(self.step())

    def step(self) -> jax.Array:
        """Enqueues a step and returns its loss."""
        self._state, loss = self._program(self._state, self.batch)
        return loss

    def seconds(self) -> float:
        """Returns the time of a step."""
        work = DeviceWork(self.step, jax.block_until_ready, passes=1)
        return work.seconds(STEPS) / STEPS


@dataclass(frozen=True)
class Row(Result):
    """The measured time of a training step, and its collectives.

    tokens: of all GPUs.
    loss: of the first step.
    ratio: to the tokens per second of one GPU; None where that was not measured.
    collectives: how many of each kind the compiled program has.
    gathered: those of them that may have gathered something of attention.
    """

    tokens: int
    loss: float
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    tokens_per_second: float
    ratio: float | None
    collectives: dict[str, int]
    gathered: dict[str, int]

    def __str__(self) -> str:
        spread = f"({self.fastest_ms:.1f} to {self.slowest_ms:.1f})"
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} x one GPU"
        moved = ", ".join(f"{count} {name}" for name, count in self.collectives.items())
        rate = f"{self.tokens_per_second:9.0f} tokens/s"
        return self.describe(f"{self.median_ms:8.1f} ms {spread:18s} {rate}  {ratio:15s}  {moved}")


def gathered(found: Counter[str], tokens: int) -> dict[str, int]:
    """Returns the collectives that may have gathered something of attention, with what a device gets.

    These add nothing up and have at least one number for each token of an example, as a head's log-sum-exp.
    """
    return {
        name: count
        for name, count in found.items()
        if not name.startswith(("all-reduce", "reduce-scatter"))
        and math.prod(map(int, re.findall(r"\d+", name.partition("[")[2]))) >= tokens
    }


def measure(chosen: Iterable[Case], tokens: int, sizes: Sizes, repeats: int) -> list[Row | Failure]:
    """Returns the rows of some cases with one mask, and those that failed."""
    trainers: dict[str, Trainer] = {}
    failures: list[Failure] = []
    for case in chosen:
        makers = {case.implementation: functools.partial(Trainer, case, tokens, sizes)}
        made, failed = make_each(case.workload, DIRECTION, makers)
        trainers |= {trainer.case.name: trainer for trainer in made.values()}
        failures += failed
    for trainer in trainers.values():
        trainer.seconds()  # the first time so many steps are under way takes longer
    timings = time_in_turns(trainers, repeats, lambda name: trainers[name].seconds())
    return [*to_rows(trainers, timings), *failures]


def to_rows(trainers: dict[str, Trainer], timings: dict[str, Timing]) -> list[Row]:
    """Returns the rows of cases with one mask."""
    rates = {name: trainer.batch.tokens.size / timings[name].median for name, trainer in trainers.items()}

    def to_row(name: str, trainer: Trainer) -> Row:
        case = trainer.case
        one_gpu = rates.get(f"{case.mask}, {ONE_GPU}, {case.implementation}")
        return Row(
            case.workload,
            DIRECTION,
            case.implementation,
            tokens=trainer.batch.tokens.size,
            loss=trainer.first_loss,
            **in_unit(timings[name], "ms"),
            tokens_per_second=rates[name],
            ratio=rates[name] / one_gpu if one_gpu else None,
            collectives=dict(collective_names(trainer.text)),
            gathered=gathered(collectives(trainer.text), trainer.batch.mask.q_len),
        )

    return [to_row(name, trainer) for name, trainer in trainers.items()]


def checks(rows: Iterable[Row | Failure]) -> list[Check]:
    """Requires that ours gathers nothing, and on two GPUs is so many times as fast as on one."""
    made = []
    for row in rows:
        _, _, setup = row.workload.partition(", ")
        if row.implementation != OURS or setup == ONE_GPU:
            continue
        ratio, count = (row.ratio, sum(row.gathered.values())) if isinstance(row, Row) else (None, None)
        made.append(check(row.workload, DIRECTION, "arrays gathered", count, at_most=0))
        if setup in AT_LEAST:
            made.append(check(row.workload, DIRECTION, ONE_GPU, ratio, at_least=AT_LEAST[setup]))
    return made


def run(arguments: argparse.Namespace) -> None:
    """Measures what the pattern selects."""
    sizes = Sizes(arguments.layers, arguments.width, HEADS, KEY_HEADS, VOCABULARY)
    about = gpu_environment() | {"tokens": arguments.tokens, "examples": arguments.batch} | asdict(sizes)
    report = Report[Row | Failure]("sharding", arguments.out, about, checks)
    for mask in MASKS:
        found = cases(mask, arguments.gpus, arguments.batch)
        chosen = [case for case in found if re.search(arguments.rows, case.name)]
        report.add(measure(chosen, arguments.tokens, sizes, arguments.repeats))
    report.finish()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="that the batch and the heads are spread over")
    parser.add_argument("--tokens", type=int, default=16_384, help="of an example")
    parser.add_argument("--batch", type=int, default=2, help="examples on one GPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048, help="of the residual stream")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
