"""``calibrate``: measures this machine for the planner."""

import argparse

from ..attention import DTYPES
from ..calibration import calibrate
from ._heads import HEADS, add_cost_argument, check_heads

HELP = "measure the speeds of this machine for the planner"
DESCRIPTION = (
    "Measures the devices of this machine, as jaxmagi.calibrate does, and prints the cost model as an "
    "expression of Python, to be given to jaxmagi.plan_context on any machine."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    group = parser.add_argument_group("attention")
    for option, name, text in HEADS:
        add_cost_argument(group, option, name, text)
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of all operands (bfloat16)")


def run(options: argparse.Namespace) -> int:
    """Prints the model.

    Raises:
        ValueError: an option has a value that cannot be.
        ImportError: the compiled planner is missing.
        RuntimeError: JAX finds no device, or no speed explains what was measured.
    """
    check_heads(options)
    cost = calibrate(
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
    )
    print(f"jaxmagi.{cost!r}")
    return 0
