"""``calibrate``: measures this machine for the planner."""

import argparse

from ..attention import DTYPES
from ..calibration import calibrate
from ._backends import backends
from ._cost import HEADS, add_cost_argument, cost_of, write_cost
from ._paths import path

HELP = "measure the speeds of this machine for the planner"
DESCRIPTION = (
    "Measures the devices of this machine, as jaxmagi.calibrate does, and prints the cost model as an "
    "expression of Python, to be given to jaxmagi.plan_context on any machine."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    group = parser.add_argument_group("attention")
    for option, name, text in HEADS:
        add_cost_argument(group, option, name, text)
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of all operands (bfloat16)")
    parser.add_argument("--out", type=path, metavar="FILE", help="where to write it for `plan --cost`, too")


def run(options: argparse.Namespace) -> int:
    """Prints the measured cost model.

    Raises:
        ValueError: an option has an invalid value.
        OSError: the file cannot be written.
        ImportError: the compiled planner is missing.
        RuntimeError: JAX finds no device, or no speed explains the measured times.
    """
    heads = cost_of(options)
    backends()  # before calibrate, for its error
    cost = calibrate(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=options.dtype,
    )
    print(f"jaxmagi.{cost!r}")
    if options.out is not None:
        write_cost(cost, options.out)
    return 0
