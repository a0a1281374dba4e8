"""Checks the plans of random masks, ranks, hosts, chunk sizes, layouts and levels against dense masks.

    uv run python -m benchmarks.plan_fuzz [--cases 5000] [--first 0] [--save]

Every needed row is received exactly once, every gradient returns exactly once, every visible cell is computed
exactly once in both passes, tables fit into their sizes, and a second plan is the same to the byte. Stops
at the first case that fails, with its number: ``tests/planning/fuzz.py`` makes the same case from it again.
"""

import argparse
import collections
import dataclasses
import time

import jax
import numpy as np

from benchmarks._measure import save
from tests.planning.fuzz import Problem, check_problem, random_problem


@dataclasses.dataclass(frozen=True)
class Row:
    """The number of cases with a value of an option."""

    option: str
    value: str
    cases: int


def options_of(problem: Problem) -> dict[str, str]:
    """Returns the options that a case is counted by."""
    layout = problem.arguments["layout"]
    cp_size, per_host = problem.arguments["cp_size"], problem.arguments["cost"].ranks_per_host
    return {
        "layout": layout if isinstance(layout, str) else "array",
        "two_levels": str(problem.arguments["two_levels"]),
        "hosts": str(-(-cp_size // per_host)),
        "cp_size": str(cp_size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/plan_fuzz.json")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    begin = time.perf_counter()
    for seed in range(arguments.first, arguments.first + arguments.cases):
        problem = random_problem(seed)
        try:
            check_problem(problem)
        except Exception as error:
            error.add_note(f"case {seed}: {problem.mask}, {problem.arguments}")
            raise
        counts.update(options_of(problem).items())
    seconds = round(time.perf_counter() - begin, 1)
    print(f"{arguments.cases} cases passed in {seconds} s")
    if arguments.save:
        rows = [Row(option, value, number) for (option, value), number in sorted(counts.items())]
        details = {"first": arguments.first, "cases": arguments.cases, "failed": 0, "seconds": seconds}
        print("saved", save("plan_fuzz", rows, **details, numpy=np.__version__))


if __name__ == "__main__":
    main()
