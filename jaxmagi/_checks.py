"""Checks of arguments that several parts of the package share."""

import operator
from collections.abc import Collection
from typing import Any

import jax
from jax.core import Tracer

MAX_LENGTH = 2**30  # of a sequence, so that the sum of two positions fits into an int32


def is_traced(tree: Any) -> bool:
    """Returns whether a leaf of the pytree is traced, so that it has no values on the host."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def integer(value: Any, name: str, *, minimum: int = 0, maximum: int = MAX_LENGTH) -> int:
    """Returns ``value`` as an int; ValueError unless it is one between ``minimum`` and ``maximum``."""
    if is_traced(value):
        raise ValueError(f"{name} is traced: masks and plans are built on the host, from Python integers.")
    message = f"{name} must be an integer, but it is {value!r}."
    if isinstance(value, bool):
        raise ValueError(message)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(message) from error
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} must be between {minimum} and {maximum}, but it is {number}.")
    return number


def check_one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises ValueError unless ``value`` is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, but it is {value!r}.")
