"""Builds masks from options: ``--mask`` names a builder, other options are its arguments."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from .. import masks
from ..masks import AttnMask
from ._lengths import at_least, read_lengths


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
}


def add_mask_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `mask_of` reads."""
    group = parser.add_argument_group("mask")
    group.add_argument("--mask", required=True, choices=_BUILDERS)
    group.add_argument(
        "--lengths",
        metavar="FILE",
        help="documents, shared-prefix: tokens of each document or branch, separated by commas or lines; "
        "or a histogram, a csv with the columns range ([from, to]) and number",
    )
    group.add_argument(
        "--tokens",
        type=at_least(1),
        metavar="N",
        help="causal, full, sliding-window: tokens of the sequence. documents, shared-prefix: lengths are "
        "drawn from FILE, always the same, until they sum to N, N / 4 at most each",
    )
    group.add_argument(
        "--left", type=at_least(-1), metavar="N", help="sliding-window: keys before the own; -1 = all"
    )
    group.add_argument(
        "--right", type=at_least(-1), metavar="N", help="sliding-window: keys after the own (0); -1 = all"
    )
    group.add_argument("--num-chunks", type=at_least(1), metavar="N", help="video: chunks")
    group.add_argument(
        "--tokens-per-chunk", type=at_least(1), metavar="N", help="video: tokens of each chunk"
    )
    group.add_argument(
        "--kv-range", type=at_least(1), metavar="N", help="video: chunks seen, the own included"
    )
    group.add_argument("--prefix", type=at_least(0), metavar="N", help="shared-prefix: tokens of the prompt")


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
