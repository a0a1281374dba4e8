"""Trains a small language model on Python's own source code, with the sequence spread over a mesh axis.

Batches are spread over a second axis, and heads and hidden units, with their weights, over a third.

uv run examples/train_lm.py                       # 8 host devices (or the GPUs there are), 2 x 4 x 1 mesh
uv run examples/train_lm.py --check               # compare the losses with those of one device
uv run examples/train_lm.py --seq-len 8192 --context 8 --data 1
uv run examples/train_lm.py --data 2 --context 2 --tensor 2
uv run examples/train_lm.py --attention-dtype bfloat16    # on GPUs, where the kernels take no float32
"""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from lm_data import VOCABULARY, Packed, load_documents, pack
from lm_model import Config, Mask, Transformer
from tqdm import tqdm

import jaxmagi
from jaxmagi import masks

TOKEN_FIELDS = ("tokens", "targets", "weights", "positions")


type Plans = tuple[jaxmagi.ContextPlan, jaxmagi.ContextPlan]
"""The plans of one sequence for the even and for the odd layers."""


class Batch(NamedTuple):
    """Holds the inputs of a training step; arrays are ``[B, T]``."""

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    positions: jax.Array
    window: Mask
    full: Mask


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses these arguments, or those of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--data", type=int, help="size of the data axis = sequences of a batch")
    parser.add_argument("--context", type=int, help="size of the context axis")
    parser.add_argument("--tensor", type=int, default=1, help="size of the tensor axis")
    parser.add_argument("--window", type=int, default=256, help="keys that even layers see, self included")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--attention-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--check", action="store_true", help="compare with one device, where nothing is sharded"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    arguments = parser.parse_args(given)
    if arguments.heads % arguments.tensor:
        parser.error(f"--tensor {arguments.tensor} does not divide --heads {arguments.heads}")
    return arguments


def to_config(arguments: argparse.Namespace) -> Config:
    """Returns the sizes of the model, the same on the mesh and on the one device of ``--check``."""
    names = ("layers", "width", "heads", "kv_heads", "head_dim", "attention_dtype")
    # 8/3 of the width, rounded up to a multiple of the tensor axis.
    hidden = math.ceil(8 * arguments.width // 3 / arguments.tensor) * arguments.tensor
    return Config(VOCABULARY, hidden=hidden, **{name: getattr(arguments, name) for name in names})


def make_mesh(data: int | None, context: int | None, tensor: int) -> jax.sharding.Mesh:
    """Returns a data x context x tensor mesh: by default 2 x 4 x 1 host devices, or 1 x all GPUs x 1."""
    # The number of host devices has to be set before the first use of a device.
    jax.config.update("jax_num_cpu_devices", (data or 2) * (context or 4) * tensor)
    devices = jax.devices()
    data = data or (2 if jax.default_backend() == "cpu" else 1)
    context = context or len(devices) // (data * tensor)
    shape = (data, context, tensor)
    if not 0 < math.prod(shape) <= len(devices):
        raise SystemExit(f"a {data} x {context} x {tensor} mesh does not fit on {len(devices)} devices")
    kinds = (AxisType.Auto,) * 3
    return jax.make_mesh(shape, ("data", "context", "tensor"), kinds, devices=devices[: math.prod(shape)])


def document_masks(sequence: Packed, window: int) -> tuple[jaxmagi.AttnMask, jaxmagi.AttnMask]:
    """Returns the masks of even layers (documents and sliding window) and of odd ones (causal documents)."""
    return masks.documents(sequence.lengths, (window - 1, 0)), masks.documents(sequence.lengths, "causal")


def local_batch(sequences: list[Packed], window: int) -> Batch:
    """Returns the batch for one device: tokens in their global order, and a mask for each sequence."""
    even, odd = zip(*(document_masks(sequence, window) for sequence in sequences), strict=True)
    columns = {name: jnp.stack([getattr(sequence, name) for sequence in sequences]) for name in TOKEN_FIELDS}
    return Batch(**columns, window=jaxmagi.AttnMask.stack(even), full=jaxmagi.AttnMask.stack(odd))


class ContextBatches:
    """Plans sequences, and makes batches of sequences and plans, sharded over mesh axes data and context.

    All plans have as many levels as those of ``example``, which must be the same on every host, and their
    capacities only grow, so that the training step compiles at most a few times.
    """

    def __init__(self, mesh: jax.sharding.Mesh, window: int, example: Packed):
        self.window = window
        self.cp_size = mesh.shape["context"]
        plans = jaxmagi.plan_contexts(document_masks(example, window), self.cp_size)
        self.two_levels = [plan.two_levels for plan in plans]
        self.sharding = NamedSharding(mesh, P("data", "context"))
        self.capacities: list[jaxmagi.PlanCapacity | None] = [None, None]

    def __call__(self, sequences: list[Packed], plans: list[Plans]) -> Batch:
        window, full = zip(*plans, strict=True)
        columns = {name: self.dispatch(name, sequences, full) for name in TOKEN_FIELDS}
        return Batch(**columns, window=self.stack(0, window), full=self.stack(1, full))

    def dispatch(self, name: str, sequences: list[Packed], plans: Sequence[jaxmagi.ContextPlan]) -> jax.Array:
        """Puts one field of all sequences on the devices, each in the token order of its plan."""
        rows = [jaxmagi.dispatch(getattr(s, name), plan) for s, plan in zip(sequences, plans, strict=True)]
        return jax.device_put(np.stack(rows), self.sharding)

    def plan(self, sequence: Packed) -> Plans:
        """Returns the plans of the even and of the odd layers, on one layout that balances both."""
        sequence_masks = document_masks(sequence, self.window)
        window, full = jaxmagi.plan_contexts(sequence_masks, self.cp_size, two_levels=self.two_levels)
        return window, full

    def stack(self, kind: int, plans: Sequence[jaxmagi.ContextPlan]) -> jaxmagi.ContextPlan:
        """Stacks the plans of all sequences, at the largest capacity so far."""
        stacked = jaxmagi.ContextPlan.stack(plans)
        capacity = stacked.capacity.union(self.capacities[kind] or stacked.capacity)
        self.capacities[kind] = capacity
        return jax.device_put(stacked.pad_to(capacity), self.sharding)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Makes one step of the optimizer and returns the mean loss in nats per token."""

    def loss_fn(model: Transformer) -> jax.Array:
        logits = model(batch.tokens, batch.positions, batch.window, batch.full)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def initialise(config: Config, arguments: argparse.Namespace) -> tuple[Transformer, nnx.Optimizer]:
    """Returns a new model and its optimizer; under jit, no device ever holds all of a sharded weight."""
    model = Transformer(config, nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, arguments.learning_rate, 5, max(6, arguments.steps))
    return model, nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)


def train(config: Config, batches: Iterator[Batch], arguments: argparse.Namespace, label: str) -> list[float]:
    """Trains a freshly initialised model and returns the loss of every step."""
    model, optimizer = nnx.jit(functools.partial(initialise, config, arguments))()
    losses = []
    with tqdm(itertools.islice(batches, arguments.steps), label, arguments.steps, unit="step") as progress:
        for batch in progress:
            losses.append(float(train_step(model, optimizer, batch)))
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def packed_batches(length: int, size: int) -> Iterator[list[Packed]]:
    """Yields batches of ``size`` sequences without end, the same ones on every call."""
    sequences = pack(load_documents(), length, seed=0)
    while True:
        yield list(itertools.islice(sequences, size))


def save_picture(path: Path, curves: dict[str, list[float]], plan: jaxmagi.ContextPlan) -> None:
    """Draws the loss curves next to the mask of one sequence, coloured by rank."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), width_ratios=(1, 1.8))
    figure.subplots_adjust(left=0.05, right=0.97, wspace=0.12)
    for (label, losses), style in zip(curves.items(), ("-", ":"), strict=False):
        left.plot(losses, style, label=label, linewidth=2)
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="training on Python's standard library")
    left.legend()
    plan.draw(right)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def check(losses: list[float], reference: list[float]) -> None:
    """Exits with an error unless the two loss curves agree to 1e-4."""
    difference = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
    print(f"largest difference to one device: {difference:.1e} nats")
    if difference > 1e-4:
        raise SystemExit(f"losses differ by {difference} > 1e-4")


def main() -> None:
    arguments = parse_arguments()
    mesh = make_mesh(arguments.data, arguments.context, arguments.tensor)
    config = to_config(arguments)
    sequences = functools.partial(packed_batches, arguments.seq_len, mesh.shape["data"])
    to_batch = ContextBatches(mesh, arguments.window, example=next(sequences())[0])
    label = "{data} x {context} x {tensor} mesh".format_map(mesh.shape)
    planned = jaxmagi.prefetch_plans(sequences(), lambda batch: list(map(to_batch.plan, batch)))
    with jax.set_mesh(mesh), planned:
        distributed = dataclasses.replace(config, batch_axis_name="data", tensor_axis_name="tensor")
        losses = train(distributed, itertools.starmap(to_batch, planned), arguments, label)
    curves = {label: losses}
    if arguments.check:
        to_local_batch = functools.partial(local_batch, window=arguments.window)
        curves["one device"] = train(config, map(to_local_batch, sequences()), arguments, "one device")
        check(losses, curves["one device"])
    picture = arguments.out / "train_lm.png"
    save_picture(picture, curves, to_batch.plan(next(sequences())[0])[1])
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte; picture: {picture}")


if __name__ == "__main__":
    main()
