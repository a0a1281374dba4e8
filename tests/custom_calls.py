"""The custom calls of jaxmagi in a program lowered for GPUs, on a machine that may have none."""

import ast
import re
from typing import Any

import jax

CALL = re.compile(r"custom_call @(jaxmagi_\w+)\(.*")
TENSOR = re.compile(r"tensor<([^>]*)>")
ATTRIBUTE = re.compile(r"(\w+) = (\S+) : [fi]64")
ARRAY = re.compile(r"(\w+) = dense<([^>]*)> : tensor")
FLAG = re.compile(r"(\w+) = (true|false)")


class Call:
    """A custom call: its attributes and flags, and the types of operands and results as in "2x8xbf16".

    ``aliases`` has for operands which result takes their place.
    """

    def __init__(self, line: str, target: str) -> None:
        self.target = target
        attributes = re.search(r"mhlo.backend_config = \{([^}]*)\}", line)
        assert attributes
        self.attributes = {name: float(value) for name, value in ATTRIBUTE.findall(attributes[1])}
        self.arrays = {name: _numbers(value) for name, value in ARRAY.findall(attributes[1])}
        self.flags = {name: value == "true" for name, value in FLAG.findall(attributes[1])}
        operands, results = line.rsplit(" : (", 1)[1].split(" -> ")
        self.operands, self.results = TENSOR.findall(operands), TENSOR.findall(results)
        self.has_side_effect = "has_side_effect = true" in line
        aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", line)
        self.aliases = {int(operand): int(result) for result, operand in aliases}


def _numbers(text: str) -> list[int]:
    """Returns the numbers of an array, which is printed as a number if it has only one."""
    value = ast.literal_eval(text)
    return value if isinstance(value, list) else [value]


def lower(function: Any, *args: Any) -> str:
    """The program for GPUs, before XLA compiles it."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text: str) -> list[Call]:
    """All that a program makes, in the order of its text."""
    return [Call(match[0], match[1]) for match in CALL.finditer(text)]
