"""jax.vmap over any operands of context_attention: results and gradients are those of a loop."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmagi import ContextPlan, context_attention, masks, plan_context

from ..cases import FP64_TOLERANCE
from .harness import AXIS, Problem, Solution, dispatch_problem, make_mesh, random_problem, solve

RANKS, LENGTH = 4, 32
MASKS = [masks.causal(LENGTH), masks.documents([17, 15]), masks.sliding_window(LENGTH, 9)]
NAMES = ("query", "key", "value", "sinks", "plan")
SEQUENCES = {"query", "key", "value"}
LEVELS = pytest.mark.parametrize("ranks_per_host", [None, 2], ids=["one_level", "two_levels"])

type Mapped = list[set[str]]
"""The operands that each vmap maps over, the outermost first."""


def attend(query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
    return context_attention(query, key, value, plan, axis_name=AXIS, sinks=sinks, return_residual=True)


def on_ranks(function: Any, mapped: Mapped) -> Any:
    """Maps a function over the ranks. Operands and results lead with an axis of each vmap that has them."""

    def rows(name: str) -> P:
        return P(*[None for names in mapped if name in names], AXIS)

    in_specs = [P() if name in ("sinks", "plan") else rows(name) for name in NAMES]
    out_specs = P(*[None] * len(mapped), AXIS)
    return jax.shard_map(function, mesh=make_mesh(RANKS), in_specs=tuple(in_specs), out_specs=out_specs)


@functools.cache
def alone() -> Any:
    """Compiles the solution of one example."""
    return jax.jit(functools.partial(solve, on_ranks(attend, [])))


def make_plans(ranks_per_host: int | None) -> list[ContextPlan]:
    """Returns plans of one size, in one order of tokens."""
    first, *others = MASKS
    plans = [plan_context(first, RANKS, chunk_size=4)]
    plans += [plan_context(mask, RANKS, layout=plans[0].token_order) for mask in others]
    if ranks_per_host is not None:
        plans = [plan.by_host(ranks_per_host) for plan in plans]
    stacked = ContextPlan.stack(plans)
    return [take(stacked, i) for i in range(len(plans))]


def take(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


class Examples:
    """Operands, each with the axes of those vmaps that map over it, and cotangents of all examples."""

    def __init__(self, rng: np.random.Generator, mapped: Mapped, ranks_per_host: int | None) -> None:
        self.mapped, self.sizes = mapped, (2, 3)[: len(mapped)]
        plans, count = make_plans(ranks_per_host), len(MASKS)
        many = [dispatch_problem(random_problem(rng, LENGTH), plans[0]) for _ in range(np.prod(self.sizes))]
        stacked = Problem(*map(np.stack, zip(*many, strict=True)))
        self.operands = {}
        for name in NAMES:
            shape = [size for size, names in zip(self.sizes, mapped, strict=True) if name in names]
            chosen = np.arange(np.prod(shape, dtype=int)).reshape(shape)
            of_plans = name == "plan"
            tree = ContextPlan.stack(plans) if of_plans else getattr(stacked, name)
            self.operands[name] = take(tree, chosen % count if of_plans else chosen)
        shape = self.sizes
        self.cotangents = [x.reshape(*shape, *x.shape[1:]) for x in (stacked.dout, stacked.dlse)]

    def index(self, name: str, example: tuple[int, ...]) -> tuple[int, ...]:
        """Returns where an example's operand is."""
        return tuple(i for i, names in zip(example, self.mapped, strict=True) if name in names)

    def by_vmap(self) -> Solution:
        function: Any = attend
        for names in reversed(self.mapped):
            function = jax.vmap(function, tuple(0 if name in names else None for name in NAMES))
        *rows, plan = self.operands.values()
        return jax.jit(functools.partial(solve, on_ranks(function, self.mapped)))(
            Problem(*rows, *self.cotangents), plan
        )

    def by_loop(self) -> Solution:
        """Gradients of operands that examples share are summed."""
        found: dict[str, Any] = {name: np.zeros(self.operands[name].shape) for name in NAMES[:-1]}
        outs, lses = (np.zeros(x.shape) for x in self.cotangents)
        for example in np.ndindex(*self.sizes):
            *rows, plan = (take(x, self.index(name, example)) for name, x in self.operands.items())
            one = alone()(Problem(*rows, *take(self.cotangents, example)), plan)
            outs[example], lses[example] = one.out, one.lse
            for name, total in found.items():
                total[self.index(name, example)] += np.asarray(getattr(one, name))
        return Solution(outs, lses, **found)


def check(examples: Examples) -> None:
    for name, got, want in zip(Solution._fields, examples.by_vmap(), examples.by_loop(), strict=True):
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want), err_msg=name)
        np.testing.assert_allclose(got, want, atol=FP64_TOLERANCE, err_msg=name)


# The rule folds the tables of a plan one by one, however many levels they are of. So two levels are tested
# where tables are mapped, and where they are not.
TWO_LEVELS: list[Mapped] = [
    [SEQUENCES],
    [{"plan"}],
    [{*NAMES}],
    [SEQUENCES, {"plan"}],
    [{"plan", "key"}, {"query", "plan"}],
]


def of_axes(*mapped: Mapped) -> pytest.MarkDecorator:
    """Runs a test on operands that are mapped, by plans of one level, and of two where these are listed."""
    cases = [(each, None) for each in mapped] + [(each, 2) for each in mapped if each in TWO_LEVELS]

    def name(each: Mapped, ranks_per_host: int | None) -> str:
        axes = " of ".join("-".join(sorted(names)) for names in each)
        return f"{axes}-{'two_levels' if ranks_per_host else 'one_level'}"

    return pytest.mark.parametrize(
        ("mapped", "ranks_per_host"), [pytest.param(*case, id=name(*case)) for case in cases]
    )


@of_axes(
    [SEQUENCES],
    [{"plan"}],
    [SEQUENCES | {"plan"}],
    [{*NAMES}],
    [{"query"}],
    [{"key", "value"}],
    [{"sinks"}],
)
def test_one_axis(mapped: Mapped, ranks_per_host: int | None, x64: None, rng: np.random.Generator) -> None:
    check(Examples(rng, mapped, ranks_per_host))


@of_axes(
    [SEQUENCES, {"plan"}],
    [{"plan"}, SEQUENCES],
    [SEQUENCES, SEQUENCES | {"plan"}],
    [{"sinks"}, {*NAMES}],
    [{"query", "sinks"}, {"sinks"}],
    [{"plan", "key"}, {"query", "plan"}],
)
def test_two_axes(mapped: Mapped, ranks_per_host: int | None, x64: None, rng: np.random.Generator) -> None:
    check(Examples(rng, mapped, ranks_per_host))


def test_axes_in_other_places(x64: None, rng: np.random.Generator) -> None:
    examples = Examples(rng, [{*NAMES}], None)
    query, key, value, sinks, plans = examples.operands.values()
    rows = P(None, AXIS), P(AXIS), P(AXIS), P(), P()
    mapped = jax.shard_map(
        jax.vmap(attend, (0, 1, 3, 1, 0), 1), mesh=make_mesh(RANKS), in_specs=rows, out_specs=P(AXIS)
    )
    moved = query, np.moveaxis(key, 0, 1), np.moveaxis(value, 0, 3), sinks.T, plans
    dout, dlse = (np.moveaxis(x, 0, 1) for x in examples.cotangents)
    got = jax.jit(functools.partial(solve, mapped))(Problem(*moved[:4], dout, dlse), plans)
    places = Solution(1, 1, 0, 1, 3, 1)
    for x, place, want in zip(got, places, examples.by_loop(), strict=True):
        np.testing.assert_allclose(np.moveaxis(x, place, 0), want, atol=FP64_TOLERANCE)


@LEVELS
def test_cotangents_alone(ranks_per_host: int | None, x64: None, rng: np.random.Generator) -> None:
    """The backward pass has a batch, and the forward pass has none."""
    plan, *_ = make_plans(ranks_per_host)
    first, second = (dispatch_problem(random_problem(rng, LENGTH), plan) for _ in range(2))
    mapped, operands = on_ranks(attend, []), first[:4]
    cotangents = [(first.dout, first.dlse), (second.dout, second.dlse)]

    @jax.jit
    def gradients(dout: jax.Array, dlse: jax.Array) -> Any:
        _, pull = jax.vjp(lambda *rows: mapped(*rows, plan), *operands)
        return jax.vmap(pull)((dout, dlse))

    got = gradients(*map(np.stack, zip(*cotangents, strict=True)))
    for i, (dout, dlse) in enumerate(cotangents):
        want = alone()(first._replace(dout=dout, dlse=dlse), plan)[2:]
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[i], y, atol=FP64_TOLERANCE)


def test_sinks_are_added_before_rounding(rng: np.random.Generator) -> None:
    """Sets of sinks share one pass in float32: results are those of bfloat16 but for ties of roundings."""
    plan, *_ = make_plans(None)
    query, key, value, *_ = dispatch_problem(random_problem(rng, LENGTH, jnp.bfloat16), plan)
    sinks = rng.normal(size=(4, query.shape[1])).astype(np.float32)

    def local(query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
        by_vmap = jax.vmap(attend, (None, None, None, 0, None))(query, key, value, sinks, plan)
        return by_vmap[0], jnp.stack([attend(query, key, value, one, plan)[0] for one in sinks])

    got, want = jax.jit(on_ranks(local, [{"sinks"}]))(query, key, value, sinks, plan)
    assert got.dtype == want.dtype == jnp.bfloat16
    assert np.mean(got != want) < 0.01


@LEVELS
def test_no_example(ranks_per_host: int | None) -> None:
    """An axis of size 0 works in both passes, over sinks too."""
    plan, *_ = make_plans(ranks_per_host)

    def local(x: jax.Array, sinks: jax.Array) -> Any:
        def one(x: jax.Array, sinks: jax.Array) -> jax.Array:
            return context_attention(x, x, x, plan, axis_name=AXIS, sinks=sinks)

        y, pull = jax.vjp(jax.vmap(one, (1, 0), 1), x, sinks)
        return y, pull(y)[0]

    mapped = jax.shard_map(local, mesh=make_mesh(RANKS), in_specs=(P(AXIS), P()), out_specs=P(AXIS))
    x, sinks = np.zeros((LENGTH, 0, 2, 8), np.float32), np.zeros((0, 2), np.float32)
    y, dx = jax.jit(mapped)(x, sinks)
    assert y.shape == dx.shape == x.shape
