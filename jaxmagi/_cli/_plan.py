"""``plan``: plans a mask over many ranks, reports what each does, and draws it."""

import argparse
import importlib

from ..planning import CostModel, LevelChoice, plan_context
from ._cost import HEADS, add_cost_argument, cost_of, read_cost
from ._lengths import at_least
from ._masks import add_mask_arguments, mask_of
from ._paths import path

HELP = "plan a mask over ranks: balance, traffic and predicted time"
DESCRIPTION = (
    "Plans the attention of a mask over ranks, as jaxmagi.plan_context does, and prints what each computes, "
    "sends and receives. Needs no accelerator."
)

_LEVELS: dict[str, LevelChoice] = {"auto": "auto", "yes": True, "no": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_mask_arguments(parser)
    group = parser.add_argument_group("plan")
    group.add_argument("--cp", required=True, type=at_least(1), metavar="N", help="ranks")
    group.add_argument("--chunk-size", type=at_least(1), metavar="N", help="tokens of a chunk (chosen)")
    group.add_argument(
        "--two-levels", choices=_LEVELS, default="auto", help="rows cross to another host once (auto)"
    )
    group.add_argument(
        "--out", type=path, metavar="FOLDER", help="where to write mask.png, ranks.png and timeline.png"
    )
    group = parser.add_argument_group("attention and hosts, for bytes and times")
    for option, name, text in (
        *HEADS,
        ("--bytes-per-element", "bytes_per_element", "of keys and values"),
        ("--bytes-per-gradient", "bytes_per_gradient", "of their gradients while these travel"),
        ("--ranks-per-host", "ranks_per_host", "ranks whose links are those within a host"),
    ):
        add_cost_argument(group, option, name, text)
    group.add_argument(
        "--cost", type=path, metavar="FILE", help="speeds and the above, as `calibrate --out` writes them"
    )


def run(options: argparse.Namespace) -> int:
    """Writes the pictures and prints the report.

    Raises:
        ValueError: an option has an invalid value.
        OSError: a file cannot be read or written.
        ImportError: rich, the compiled planner or, for pictures, matplotlib is missing.
        NotImplementedError: the planner does not support so large a plan.
    """
    _require("rich", "plan", "cli")
    if options.out is not None:
        _require("matplotlib", "--out", "plot")
    cost = cost_of(options, CostModel() if options.cost is None else read_cost(options.cost))
    mask = mask_of(options)
    if not mask.q_len:
        raise ValueError(f"--mask {options.mask} has 0 tokens")
    plan = plan_context(
        mask,
        options.cp,
        chunk_size=options.chunk_size,
        two_levels=_LEVELS[options.two_levels],
        cost=cost,
    )
    pictures = []
    if options.out is not None:
        from ._pictures import write_pictures

        pictures = write_pictures(plan, cost, options.out)
    from ._table import print_report

    print_report(plan, cost)
    for picture in pictures:
        print(picture)
    return 0


def _require(module: str, what: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs {module}: pip install jaxmagi[{extra}]") from error
