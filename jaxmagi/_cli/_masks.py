"""Builds masks from options: ``--mask`` names a builder, other options are its arguments."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from .. import masks
from ..masks import AttnMask
from ._lengths import at_least, read_lengths, read_parents
from ._paths import path


@dataclass(frozen=True)
class _Builder:
    """Says how a mask is built, and which options this needs and allows."""

    build: Callable[[argparse.Namespace], AttnMask]
    needs: tuple[str, ...]
    allows: tuple[str, ...] = ()


_BUILDERS = {
    "documents": _Builder(
        lambda options: masks.documents(read_lengths(options.lengths, options.tokens)),
        needs=("lengths",),
        allows=("tokens",),
    ),
    "causal": _Builder(lambda options: masks.causal(options.tokens), needs=("tokens",)),
    "full": _Builder(lambda options: masks.full(options.tokens), needs=("tokens",)),
    "sliding-window": _Builder(
        lambda options: masks.sliding_window(options.tokens, options.left, options.right or 0),
        needs=("tokens", "left"),
        allows=("right",),
    ),
    "video": _Builder(
        lambda options: masks.video(options.num_chunks, options.tokens_per_chunk, options.kv_range),
        needs=("num_chunks", "tokens_per_chunk"),
        allows=("kv_range",),
    ),
    "shared-prefix": _Builder(
        lambda options: masks.shared_prefix(options.prefix, read_lengths(options.lengths, options.tokens)),
        needs=("prefix", "lengths"),
        allows=("tokens",),
    ),
    "prefix-tree": _Builder(
        lambda options: masks.prefix_tree(read_parents(options.parents), read_lengths(options.lengths, None)),
        needs=("parents", "lengths"),
    ),
}


_LENGTHS_HELP = (
    "documents, shared-prefix, prefix-tree: tokens of each document, branch or segment, separated by commas "
    "or lines; or, except for prefix-tree, a histogram, a csv with the columns range ([from, to]) and number"
)
_PARENTS_HELP = (
    "prefix-tree: the index of each segment's parent, which comes before it, or -1 for a root, separated by "
    "commas or lines"
)
_TOKENS_HELP = (
    "causal, full, sliding-window: tokens of the sequence. documents, shared-prefix: lengths are drawn from "
    "FILE, always the same, until they sum to N, N / 4 at most each"
)
_NUMBERS = (
    ("--tokens", 1, _TOKENS_HELP),
    ("--left", -1, "sliding-window: keys before the query's own; -1 = all"),
    ("--right", -1, "sliding-window: keys after the query's own (0); -1 = all"),
    ("--num-chunks", 1, "video: chunks"),
    ("--tokens-per-chunk", 1, "video: tokens of each chunk"),
    ("--kv-range", 1, "video: chunks seen, the query's own included"),
    ("--prefix", 0, "shared-prefix: tokens of the prompt"),
)


def add_mask_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `mask_of` reads."""
    group = parser.add_argument_group("mask")
    group.add_argument("--mask", required=True, choices=_BUILDERS)
    group.add_argument("--lengths", type=path, metavar="FILE", help=_LENGTHS_HELP)
    group.add_argument("--parents", type=path, metavar="FILE", help=_PARENTS_HELP)
    for option, minimum, text in _NUMBERS:
        group.add_argument(option, type=at_least(minimum), metavar="N", help=text)


def mask_of(options: argparse.Namespace) -> AttnMask:
    """Returns the mask that the options describe.

    Raises:
        ValueError: an option is missing, is not one of this mask, or has an invalid value.
        OSError: the file of lengths cannot be read.
    """
    builder = _BUILDERS[options.mask]
    known = {name for other in _BUILDERS.values() for name in (*other.needs, *other.allows)}
    given = {name for name in known if getattr(options, name) is not None}
    for name in builder.needs:
        if name not in given:
            raise ValueError(f"--mask {options.mask} needs {_flag(name)}")
    for name in sorted(given - {*builder.needs, *builder.allows}):
        raise ValueError(f"{_flag(name)} {getattr(options, name)} is not for --mask {options.mask}")
    return builder.build(options)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
