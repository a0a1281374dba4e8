"""Trains a model that somebody else wrote: the Qwen3 of google-tunix, with jaxmagi in place of its attention.

First on packed documents on one device, then on the same ones on a 2 x 4 mesh (data x context) of CPUs.
tunix_model.py is all that the model needs; docs/models.md says more, and about other models.

uv run --group models examples/train_tunix.py
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding
from lm_data import SHORTEST, VOCABULARY, Packed, load_documents, pack
from tunix_model import AttentionFn, Mask, small_qwen3, use_jaxmagi

import jaxmagi
from jaxmagi import masks

DATA, CONTEXT = 2, 4  # sizes of the mesh; a batch has one sequence for each part of the data axis
OPTIMIZER = optax.adamw(3e-3)


class Batch(NamedTuple):
    """Holds the inputs of a training step; arrays are ``[B, T]``."""

    tokens: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    targets: jax.Array | np.ndarray
    weights: jax.Array | np.ndarray
    mask: Mask


def loss_fn(model: Any, batch: Batch) -> jax.Array:
    """Returns the mean loss of the tokens that have a target, in nats."""
    logits, _ = model(batch.tokens, batch.positions, None, batch.mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)


def local_batch(sequences: list[Packed]) -> Batch:
    """Returns the batch for one device. Its mask has room for as many documents as there can be."""
    names = ("tokens", "positions", "targets", "weights")
    columns = [np.stack([getattr(sequence, name) for sequence in sequences]) for name in names]
    mask = jaxmagi.AttnMask.stack([masks.documents(sequence.lengths) for sequence in sequences])
    return Batch(*columns, mask=mask.pad_to(mask.q_len // SHORTEST + 1))


def make_plans(batches: Iterable[list[Packed]], cp_size: int) -> list[jaxmagi.ContextPlan]:
    """Plans all sequences with the levels of the first and the sizes of the largest plan: one compilation."""
    batch_masks = [[masks.documents(sequence.lengths) for sequence in sequences] for sequences in batches]
    first = jaxmagi.plan_context(batch_masks[0][0], cp_size)
    plan = functools.partial(jaxmagi.plan_context, cp_size=cp_size, two_levels=first.two_levels)
    plans = [jaxmagi.ContextPlan.stack([plan(mask) for mask in each]) for each in batch_masks]
    capacity = functools.reduce(jaxmagi.PlanCapacity.union, (stacked.capacity for stacked in plans))
    return [stacked.pad_to(capacity) for stacked in plans]


def context_batch(sequences: list[Packed], plan: jaxmagi.ContextPlan) -> Batch:
    """Returns the batch with each sequence in the order of its plan; padding has weight 0."""
    tokens, _, targets, weights, _ = local_batch(sequences)
    dispatch = jax.vmap(jaxmagi.dispatch)
    tokens, targets, weights = dispatch(tokens, plan), dispatch(targets, plan), dispatch(weights, plan)
    # Rotary embeddings see only differences of positions, so those in the sequence do as well as those in the
    # document; learned embeddings need the latter, dispatched as the tokens are.
    return Batch(tokens, plan.position_ids, targets, weights, plan)


def make_step(graph: nnx.GraphDef) -> Callable[[nnx.State, optax.OptState, Batch], Any]:
    """Returns the step of the optimizer, which maps parameters and moments to new ones and the loss."""

    @jax.jit
    def step(state: nnx.State, moments: optax.OptState, batch: Batch) -> Any:
        loss, gradients = jax.value_and_grad(lambda state: loss_fn(nnx.merge(graph, state), batch))(state)
        updates, moments = OPTIMIZER.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, loss

    return step


def train(name: str, attention_fn: AttentionFn, batches: Iterable[Batch], layout: Sharding) -> list[float]:
    """Trains a new model, prints losses and speed, and returns the losses. Parameters have this layout."""
    model = small_qwen3(VOCABULARY)
    use_jaxmagi(model, attention_fn)
    graph, state = nnx.split(model)
    step = make_step(graph)
    state, moments = jax.device_put((state, OPTIMIZER.init(state)), layout)
    losses = []
    for batch in batches:
        begin = time.perf_counter()
        state, moments, loss = step(state, moments, batch)
        losses.append(float(loss))
        speed = batch.tokens.size / (time.perf_counter() - begin)
        print(f"{name}, step {len(losses)}: loss {losses[-1]:.4f}, {speed:.0f} tokens/s")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence of packed documents")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DATA * CONTEXT)
    sequences = pack(load_documents(), arguments.seq_len, seed=0)
    batches = [list(itertools.islice(sequences, DATA)) for _ in range(arguments.steps)]
    local, attention_fn = SingleDeviceSharding(jax.devices()[0]), jaxmagi.nn.attention_fn
    reference = train("one device", attention_fn, map(local_batch, batches), local)
    mesh = jax.make_mesh((DATA, CONTEXT), ("data", "context"), (AxisType.Auto,) * 2)
    rows, whole = NamedSharding(mesh, P("data", "context")), NamedSharding(mesh, P())
    planned = map(context_batch, batches, make_plans(batches, CONTEXT))
    with jax.set_mesh(mesh):
        attention_fn = functools.partial(jaxmagi.nn.attention_fn, batch_axis_name="data")
        losses = train("2 x 4 mesh", attention_fn, (jax.device_put(batch, rows) for batch in planned), whole)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
    print(f"largest difference to one device: {np.abs(np.subtract(losses, reference)).max():.1e} nats")


if __name__ == "__main__":
    main()
