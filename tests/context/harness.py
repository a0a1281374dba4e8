"""Runs context_attention on CPU devices, compiled once per kind of call, and a single-device oracle."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, PartitionSpec as P

from jaxmagi import (
    AttnMask,
    CollectiveOptions,
    ContextPlan,
    PlanCapacity,
    attention,
    context_attention,
    dispatch,
    plan_context,
    undispatch,
)
from jaxmagi.attention import attention_reference, attention_reference_vjp

from ..cases import MaskCase, mask_cases, random_bands

AXIS = "context"
DEFAULT = CollectiveOptions()
LENGTH = 256
HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6
CAPACITY = PlanCapacity(bands=512, copies=256, pair_rows=128, output_rows=256)
"""The capacity of all plans of the tests, so that they share compilations."""
TWO_LEVELS = replace(CAPACITY, pair_rows=256, across=replace(CAPACITY, bands=0, output_rows=512))
"""That of all plans with two levels. A rank may bring all rows to their places from itself."""


class Problem(NamedTuple):
    """Holds operands and cotangents."""

    query: Any
    key: Any
    value: Any
    sinks: Any
    dout: Any
    dlse: Any


class Solution(NamedTuple):
    """Holds results and gradients."""

    out: Any
    lse: Any
    query: Any
    key: Any
    value: Any
    sinks: Any


def random_masks(rng: np.random.Generator, count: int) -> Iterator[AttnMask]:
    for _ in range(count):
        bands = random_bands(rng, LENGTH, LENGTH, int(rng.integers(1, 16)))
        yield AttnMask.from_bands(bands, q_len=LENGTH, kv_len=LENGTH)


def embedded(case: MaskCase, length: int) -> AttnMask:
    """Returns a public mask in the corner of a larger one."""
    return AttnMask.from_slices(
        case.q_ranges, case.k_ranges, case.mask_types, q_len=length, kv_len=length, check=not case.overlaps
    )


LARGE = max(max(case.q_len, case.kv_len) for case in mask_cases())


def random_problem(
    rng: np.random.Generator,
    length: int = LENGTH,
    dtype: Any = np.float64,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    v_dim: int = V_DIM,
) -> Problem:
    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(dtype)

    wide = np.float64 if dtype == np.float64 else np.float32
    return Problem(
        query=normal(length, heads, dim),
        key=normal(length, kv_heads, dim),
        value=normal(length, kv_heads, v_dim),
        sinks=normal(heads).astype(wide),
        dout=normal(length, heads, v_dim),
        dlse=normal(length, heads).astype(wide),
    )


def make_plan(
    mask: AttnMask,
    cp_size: int,
    layout: Any = "balanced",
    *,
    ranks_per_host: int | None = None,
    **options: Any,
) -> ContextPlan:
    """Returns a plan of common capacity, with several chunks per rank, and with two levels for hosts."""
    if isinstance(layout, str) and layout == "balanced":
        options.setdefault("chunk_size", 8)
    plan = plan_context(mask, cp_size, **{"layout": layout, "capacity": CAPACITY, **options})
    return plan if ranks_per_host is None else plan.by_host(ranks_per_host).pad_to(TWO_LEVELS)


def oracle(problem: Problem, mask: AttnMask, logits_soft_cap: float | None = None) -> Solution:
    """Solves a problem on the host, dense and in fp64."""
    operands = [np.asarray(x).astype(np.float64) for x in problem]
    query, key, value, sinks, dout, dlse = operands
    options: Any = {"sinks": sinks, "logits_soft_cap": logits_soft_cap}
    out, lse = attention_reference(query, key, value, mask, **options)
    gradients = attention_reference_vjp(query, key, value, mask, dout, dlse, **options)
    return Solution(out, lse, *gradients)


def make_mesh(cp_size: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((cp_size,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:cp_size])


def solve(attend: Any, problem: Problem, mask: ContextPlan | AttnMask) -> Solution:
    """Returns results and gradients of ``attend(query, key, value, sinks, mask) → (out, lse)``."""
    query, key, value, sinks, dout, dlse = problem
    (out, lse), vjp = jax.vjp(lambda *operands: attend(*operands, mask), query, key, value, sinks)
    return Solution(out, lse, *vjp((dout, dlse)))


@functools.cache
def distributed(
    cp_size: int,
    logits_soft_cap: float | None = None,
    *,
    plan_sharded: bool = False,
    collectives: CollectiveOptions = DEFAULT,
    keep_received: bool = False,
    deterministic: bool = False,
) -> Any:
    """Compiles a function of a problem in dispatched order and a plan, which returns the solution."""

    def local(query: Any, key: Any, value: Any, sinks: Any, plan: ContextPlan) -> Any:
        return context_attention(
            query,
            key,
            value,
            plan,
            axis_name=AXIS,
            sinks=sinks,
            logits_soft_cap=logits_soft_cap,
            return_residual=True,
            collectives=collectives,
            keep_received=keep_received,
            deterministic=deterministic,
        )

    rows = P(AXIS)
    mapped = jax.shard_map(
        local,
        mesh=make_mesh(cp_size),
        in_specs=(rows, rows, rows, P(), rows if plan_sharded else P()),
        out_specs=rows,
    )
    return jax.jit(functools.partial(solve, mapped))


@jax.jit
def _solve_alone(problem: Problem, mask: AttnMask) -> Solution:
    def attend(query: Any, key: Any, value: Any, sinks: Any, mask: AttnMask) -> Any:
        return attention(query, key, value, mask, sinks=sinks, return_residual=True)

    return solve(attend, problem, mask)


def solve_alone(problem: Problem, mask: AttnMask) -> Solution:
    """Solves a problem by the local op on one device."""
    return Solution(*map(np.asarray, _solve_alone(problem, mask)))


def dispatch_problem(problem: Problem, plan: ContextPlan) -> Problem:
    """Dispatches a problem, with NaN as cotangents of padding, on which nothing may depend."""
    query, key, value = (dispatch(x, plan, pad_value=3) for x in problem[:3])
    dout, dlse = (dispatch(x, plan, pad_value=np.nan) for x in problem[4:])
    return Problem(query, key, value, problem.sinks, dout, dlse)


def whole(x: Any) -> np.ndarray:
    """Returns an array on the host, also from devices of several processes."""
    is_elsewhere = isinstance(x, jax.Array) and not x.is_fully_addressable
    return np.asarray(process_allgather(x, tiled=True) if is_elsewhere else x)


def undispatch_solution(solution: Solution, plan: ContextPlan) -> Solution:
    *rows, sinks = map(whole, solution)
    return Solution(*[undispatch(x, plan) for x in rows], sinks=sinks)


def solve_distributed(problem: Problem, plan: ContextPlan, **options: Any) -> Solution:
    """Solves a problem in global order by `distributed`, with its options, on a device per rank."""
    run = distributed(plan.cp_size, **options)
    return undispatch_solution(run(dispatch_problem(problem, plan), plan), plan)


def check_solution(solution: Solution, expected: Solution, tolerance: float) -> None:
    """Compares two solutions; fully masked rows must be exact."""
    masked = np.isneginf(expected.lse)
    np.testing.assert_array_equal(np.isneginf(solution.lse), masked)
    for name, given, wanted in zip(Solution._fields, solution, expected, strict=True):
        given = np.asarray(given).astype(np.float64)
        wanted = np.where(np.isneginf(wanted), 0, wanted)
        np.testing.assert_allclose(
            np.where(np.isneginf(given), 0, given), wanted, atol=tolerance, rtol=tolerance, err_msg=name
        )
    for rows in (solution.out, solution.query):
        assert (np.asarray(rows)[masked] == 0).all()
