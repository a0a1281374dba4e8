"""The heads of an attention, as options."""

import argparse

from ..planning import CostModel
from ._lengths import at_least

_DEFAULTS = CostModel()

HEADS = (
    ("--heads", "num_heads", "query heads"),
    ("--kv-heads", "num_kv_heads", "key heads"),
    ("--head-dim", "head_dim", "head dimension"),
)
"""Options, the attributes of a cost model that they set, and what they are."""


def add_cost_argument(group: argparse._ArgumentGroup, option: str, name: str, text: str) -> None:
    """An integer of a cost model, with the model's default."""
    default = getattr(_DEFAULTS, name)
    group.add_argument(
        option, type=at_least(1), default=default, metavar="N", dest=name, help=f"{text} ({default})"
    )


def check_heads(options: argparse.Namespace) -> None:
    """ValueError unless key heads divide query heads."""
    if options.num_heads % options.num_kv_heads:
        raise ValueError(f"--heads {options.num_heads} is no multiple of --kv-heads {options.num_kv_heads}")
