"""The Qwen3 of google-tunix with the attention of examples/tunix_model.py, next to its own attention."""

import dataclasses
import functools
import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmagi

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ALWAYS_SHARD = flax.config.flax_always_shard_variable

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "jax.experimental.shard_map is deprecated", DeprecationWarning)
    qwen3 = pytest.importorskip("tunix.models.qwen3.model")

# Importing tunix switches this off for everybody. It is back on here for other tests of the process.
flax.config.update("flax_always_shard_variable", ALWAYS_SHARD)

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}:DeprecationWarning")
    for message in (
        "'sharding' is deprecated",
        "'.value' access is now",
        "jax.interpreters.pxla.thread_resources",
    )
]

VOCABULARY, BATCH, LENGTH, CP_SIZE, TOLERANCE = 61, 2, 250, 4, 1e-4  # a plan pads the length
DOCUMENTS = [[100, 1, 149], [149, 100, 1]]
OTHER_DOCUMENTS = [[250], [30, 70, 80, 70]]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Sets what tunix needs: variables that it shards itself, and operands of mixed dtypes and ranks."""
    flax.config.update("flax_always_shard_variable", False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    flax.config.update("flax_always_shard_variable", ALWAYS_SHARD)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the example, which import each other by their bare names."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = {"data": "lm_data", "model": "tunix_model", "training": "train_tunix"}
    return SimpleNamespace(**{key: importlib.import_module(name) for key, name in names.items()})


def random_model(rng: np.random.Generator, remat: str = "NONE") -> Any:
    """Returns tunix's model with all parameters random: new ones have zeros in MLPs, and ones in norms."""
    config = dataclasses.replace(
        qwen3.ModelConfig.qwen3_0p6b(),
        **{"num_layers": 2, "vocab_size": VOCABULARY, "embed_dim": 32, "hidden_dim": 48},
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "remat_config": qwen3.RematConfig[remat]},
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    def normal(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(1 if x.ndim == 1 else 0, 0.2, x.shape), jnp.float32)

    nnx.update(model, jax.tree.map(normal, nnx.state(model)))
    return model


def with_jaxmagi(example: Any, model: Any, **options: Any) -> Any:
    """Returns a copy of the model with its attention replaced."""
    copy = nnx.clone(model)
    example.model.use_jaxmagi(copy, functools.partial(jaxmagi.nn.attention_fn, **options))
    return copy


def make_sequences(example: Any, rng: np.random.Generator, documents: list[list[int]]) -> list[Any]:
    """Returns a packed sequence of random tokens for each list of lengths."""
    return [make_sequence(example, rng.integers(VOCABULARY, size=LENGTH), lengths) for lengths in documents]


def make_sequence(example: Any, tokens: np.ndarray, lengths: list[int]) -> Any:
    weights = np.ones(LENGTH, np.float32)
    weights[np.cumsum(lengths) - 1] = 0
    return example.data.Packed(
        tokens.astype(np.int32), np.roll(tokens, -1).astype(np.int32), weights, lengths
    )


def mesh_batches(example: Any, batches: list[list[Any]], mesh: jax.sharding.Mesh) -> list[Any]:
    """Returns the batches of the example, on the devices of a mesh."""
    plans = example.training.make_plans(batches, CP_SIZE)
    rows = NamedSharding(mesh, P("data", "context"))
    return [jax.device_put(b, rows) for b in map(example.training.context_batch, batches, plans)]


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((BATCH, CP_SIZE), ("data", "context"), (AxisType.Auto,) * 2)


def loss_and_gradients(example: Any, model: Any, batch: Any) -> Any:
    graph, state = nnx.split(model)
    loss = jax.value_and_grad(lambda state, batch: example.training.loss_fn(nnx.merge(graph, state), batch))
    return jax.jit(loss)(state, batch)


def logits(model: Any, tokens: Any, positions: Any, mask: Any) -> jax.Array:
    return nnx.jit(lambda model, *inputs: model(*inputs)[0])(model, tokens, positions, None, mask)


def assert_trees_agree(got: Any, want: Any) -> None:
    """Both have the same paths, and leaves that agree relative to the largest entry of each."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = np.abs(other).max()
        assert scale > 1e-4
        np.testing.assert_allclose(one / scale, other / scale, atol=TOLERANCE)


@pytest.mark.parametrize("remat", ["NONE", "BLOCK", "DECODER"])
def test_agrees_with_the_attention_of_tunix(example: Any, rng: np.random.Generator, remat: str) -> None:
    """The loss, and the gradients of all parameters, are those of the causal model as tunix ships it."""
    theirs = random_model(rng, remat)
    batch = example.training.local_batch(make_sequences(example, rng, [[LENGTH]] * BATCH))
    dense = batch._replace(mask=jnp.asarray(batch.mask.to_dense()))
    got = loss_and_gradients(example, with_jaxmagi(example, theirs), batch)
    assert_trees_agree(got, loss_and_gradients(example, theirs, dense))


def test_causal_logits_agree_with_tunix(example: Any, rng: np.random.Generator) -> None:
    theirs = random_model(rng)
    tokens, positions, _, _, mask = example.training.local_batch(
        make_sequences(example, rng, [[LENGTH]] * BATCH)
    )
    got = logits(with_jaxmagi(example, theirs), tokens, positions, mask)
    want = logits(theirs, tokens, positions, jnp.asarray(mask.to_dense()))
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_packed_documents_have_the_logits_of_each_alone(example: Any, rng: np.random.Generator) -> None:
    """Alone they go through the model as tunix ships it."""
    theirs = random_model(rng)
    tokens, positions, _, _, mask = example.training.local_batch(make_sequences(example, rng, DOCUMENTS))
    packed = logits(with_jaxmagi(example, theirs), tokens, positions, mask)
    for row, got, lengths in zip(tokens, packed, DOCUMENTS, strict=True):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            alone = np.s_[end - length : end]
            causal = jnp.tri(length, dtype=bool)[None]
            want = logits(theirs, row[None, alone], jnp.arange(length)[None], causal)
            np.testing.assert_allclose(got[alone], want[0], atol=TOLERANCE)


def test_mesh_agrees_with_one_device(example: Any, rng: np.random.Generator) -> None:
    """Loss and gradients with a plan for each sequence are those with a mask for each."""
    model, sequences, mesh = random_model(rng), make_sequences(example, rng, DOCUMENTS), make_mesh()
    local = example.training.local_batch(sequences)
    want = loss_and_gradients(example, with_jaxmagi(example, model), local)
    with jax.set_mesh(mesh):
        on_mesh = with_jaxmagi(example, model, batch_axis_name="data")
        [batch] = mesh_batches(example, [sequences], mesh)
        order = np.asarray(batch.mask.token_order)
        assert (order[0] != order[1]).any() and order.shape[1] > LENGTH
        got = loss_and_gradients(example, on_mesh, batch)
    assert_trees_agree(got, want)


def test_other_documents_compile_nothing(
    example: Any, rng: np.random.Generator, compilations: list[str]
) -> None:
    batches = [make_sequences(example, rng, documents) for documents in (DOCUMENTS, OTHER_DOCUMENTS)]
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        graph, state = nnx.split(with_jaxmagi(example, random_model(rng), batch_axis_name="data"))
        step = example.training.make_step(graph)
        whole = NamedSharding(mesh, P())
        operands: Any = jax.device_put((state, example.training.OPTIMIZER.init(state)), whole)
        first, second = mesh_batches(example, batches, mesh)
        *operands, _ = step(*operands, first)
        assert compilations
        compilations.clear()
        *_, loss = step(*operands, second)
        assert not compilations
        assert np.isfinite(loss)


@pytest.mark.parametrize(
    ("cache", "segment_ids", "message"),
    [({}, None, "cache is dict"), (None, np.ones((1, 8), np.int32), "segment_ids is ndarray")],
)
def test_what_would_be_ignored_raises(
    example: Any, rng: np.random.Generator, cache: Any, segment_ids: Any, message: str
) -> None:
    attention = with_jaxmagi(example, random_model(rng)).layers[0].attn
    with pytest.raises(NotImplementedError, match=message):
        attention(jnp.ones((1, 8, 32)), jnp.arange(8)[None], cache, jaxmagi.masks.causal(8), segment_ids)


def test_example_runs() -> None:
    """The losses fall, and are the same on one device and on the mesh."""
    command = [sys.executable, "-W", "ignore", "train_tunix.py", "--steps", "6", "--seq-len", "256"]
    run = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, last, difference = re.findall(r"loss ([\d.]+) -> ([\d.]+)[\s\S]*one device: (\S+)", run.stdout)[0]
    assert float(last) < float(first) - 0.3
    assert float(difference) < TOLERANCE
