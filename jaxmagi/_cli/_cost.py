"""Reads cost models from options and files, and writes them."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from ..planning import CostModel
from ._lengths import at_least

_DEFAULTS = CostModel()

HEADS = (
    ("--heads", "num_heads", "query heads"),
    ("--kv-heads", "num_kv_heads", "key heads"),
    ("--head-dim", "head_dim", "head dimension"),
)
"""Tuples of an option, the attribute of a cost model that it sets, and its help."""


def add_cost_argument(group: argparse._ArgumentGroup, option: str, name: str, text: str) -> None:
    """Adds an option for an integer of the cost model."""
    help = f"{text} ({getattr(_DEFAULTS, name)})"
    group.add_argument(option, type=at_least(1), metavar="N", dest=name, help=help)


def cost_of(options: argparse.Namespace, base: CostModel = _DEFAULTS) -> CostModel:
    """Returns the model ``base`` with the attributes that the options set.

    Raises:
        ValueError: key heads do not divide query heads.
    """
    given = {name: value for name in asdict(base) if (value := getattr(options, name, None)) is not None}
    heads, kv_heads = (given.get(name, getattr(base, name)) for name in ("num_heads", "num_kv_heads"))
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    return replace(base, **given)


def write_cost(cost: CostModel, path: Path) -> None:
    """Writes all attributes as a JSON object."""
    path.write_text(json.dumps(asdict(cost), indent=2) + "\n")


def read_cost(path: Path) -> CostModel:
    """Reads a file by `write_cost`; missing attributes are the defaults.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no JSON object with attributes of a cost model.
    """
    try:
        attributes = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    known = asdict(_DEFAULTS)
    if not isinstance(attributes, dict) or not attributes.keys() <= known.keys():
        raise ValueError(f"{path} must be a JSON object with attributes of CostModel ({', '.join(known)})")
    return CostModel(**attributes)
