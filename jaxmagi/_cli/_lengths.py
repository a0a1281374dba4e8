"""Reads numbers of tokens from options, and lengths of documents and parents of segments from files."""

import argparse
import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..masks import UNBOUNDED

_SEED = 42


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns a parser of an option that is an integer from ``minimum`` to 2**30."""

    def parse(text: str) -> int:
        try:
            return _integer(text, minimum)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def read_lengths(path: Path, tokens: int | None) -> list[int]:
    """Returns the lengths in a file or, with ``tokens``, lengths drawn from them that sum to ``tokens``.

    The file has lengths separated by commas or lines, or a histogram of lengths (as in `_read_histogram`).
    Drawn lengths are at most ``tokens // 4``, the last is cut to fit, and every call draws the same ones.

    Raises:
        ValueError: the file has no lengths or an invalid one, or is a histogram and ``tokens`` is None.
        OSError: the file cannot be read.
    """
    text = _read_text("lengths", path)
    if text.lstrip().startswith("range,"):
        lengths, numbers = _read_histogram(path, text)
        if tokens is None:
            raise ValueError(f"--lengths {path} is a histogram: give --tokens, to draw lengths from it")
    else:
        lengths = np.array(_read_list("lengths", path, text, minimum=0))
        numbers = np.ones(len(lengths))
    if tokens is None:
        return lengths.tolist()
    if not lengths.any():
        raise ValueError(f"--lengths {path} has no length above 0 to draw --tokens {tokens} from")
    return _draw(lengths, numbers / numbers.sum(), tokens)


def read_parents(path: Path) -> list[int]:
    """Returns the parents in a file, indices or -1, separated by commas or lines.

    Raises:
        ValueError: the file has no parents or an invalid one.
        OSError: the file cannot be read.
    """
    return _read_list("parents", path, _read_text("parents", path), minimum=-1)


def _read_text(name: str, path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"--{name} {path} is not text: {error}") from error


def _read_list(name: str, path: Path, text: str, minimum: int) -> list[int]:
    numbers = []
    for line, content in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in content.split(",")]
        try:
            numbers += [_integer(cell, minimum) for cell in cells if cell]
        except ValueError as error:
            raise ValueError(f"--{name} {path}, line {line}: {error}") from error
    if not numbers:
        raise ValueError(f"--{name} {path} has no {name}")
    return numbers


def _read_histogram(path: Path, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the middle of each range, at least 1, and the number of documents in it.

    The text is a csv with columns ``range``, as ``[from, to]`` of integers from 0 to 2**30, and ``number``;
    other columns are ignored.
    """
    middles, numbers = [], []
    for row in csv.DictReader(text.splitlines()):
        try:
            low, high = _range(row["range"])
            middles.append((max(low, 1) + high) // 2)
            numbers.append(_integer(row["number"], 0))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"--lengths {path}: a row of the histogram is {row}: {error}") from error
    if not sum(numbers):
        raise ValueError(f"--lengths {path} has no lengths")
    return np.array(middles), np.array(numbers)


def _range(text: str) -> tuple[int, int]:
    low, high = ends = json.loads(text)
    if not all(type(end) is int for end in ends) or not 0 <= low <= high <= UNBOUNDED:
        raise ValueError(f"{text!r} is not [from, to] with integers 0 <= from <= to <= {UNBOUNDED}")
    return low, high


def _draw(lengths: np.ndarray, probabilities: np.ndarray, tokens: int) -> list[int]:
    rng = np.random.default_rng(_SEED)
    drawn, left = [], tokens
    while left > 0:
        length = int(rng.choice(lengths, p=probabilities))
        drawn.append(max(1, min(length, tokens // 4, left)))
        left -= drawn[-1]
    return drawn


def _integer(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not minimum <= value <= UNBOUNDED:
        raise ValueError(f"{text!r} is not an integer from {minimum} to {UNBOUNDED}")
    return value
