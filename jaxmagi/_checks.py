"""Checks of arguments that several parts of the package share."""

import operator
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

MAX_LENGTH = 2**30  # of a sequence, so that the sum of two positions fits into an int32
_LONGEST_SHOWN = 80


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


def is_number(value: Any) -> bool:
    """Returns whether a value is a real number of Python or numpy, which no boolean and no string is."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def number(value: Any, name: str) -> float:
    """Returns ``value``, a real number or an array that holds one, as a float; ValueError for others."""
    plain = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
    if not is_number(plain):
        raise ValueError(f"{name} must be a number, but it is {value!r}.")
    return float(plain)


def flag(value: Any, name: str) -> bool:
    """Returns ``value`` as a bool; ValueError unless it is one, as strings would all be true."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, but it is {value!r}.")
    return bool(value)


def check_unmasked(tree: Any, name: str) -> None:
    """Raises ValueError for a masked array of numpy in the pytree, of which an array has all entries."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ValueError(
                f"{name} must not be a masked array, whose mask would be lost, but is {_shown(leaf)}."
            )


def require_type(value: Any, kind: type, name: str) -> None:
    """Raises ValueError unless ``value`` is of a kind."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(f"{name} must be {article} {kind.__name__}, but it is {_shown(value)}.")


def as_list(value: Any, name: str) -> list[Any]:
    """Returns what an iterable yields; ValueError if it is none."""
    try:
        return list(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a list, but it is {_shown(value)}.") from error


def list_of[Kind](value: Any, kind: type[Kind], name: str) -> list[Kind]:
    """Returns what an iterable yields; ValueError unless all of it is of a kind."""
    items = as_list(value, name)
    for i, item in enumerate(items):
        require_type(item, kind, f"{name}[{i}]")
    return items


def numpy_array(value: Any, name: str) -> np.ndarray:
    """Returns ``value`` as a numpy array; ValueError if it is masked, or nothing that numpy takes."""
    return _array(np.asarray, "numpy", value, name)


def jax_array(value: Any, name: str) -> jax.Array:
    """Returns ``value`` as a jax array; ValueError if it is masked, or nothing that jax takes."""
    return _array(jnp.asarray, "jax", value, name)


def _array[A](make: Callable[[Any], A], library: str, value: Any, name: str) -> A:
    check_unmasked(value, name)
    try:
        return make(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array, but {library} cannot make one of it: {error}") from error


def check_one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises ValueError unless ``value`` is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, but it is {value!r}.")


def _shown(value: Any) -> str:
    """Returns a value for a message, or only its type where the value takes more than a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN and "\n" not in text else type(value).__name__
