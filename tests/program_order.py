"""Tells the order of operations in a lowered program, by the data that one has from another."""

import itertools
import re

from .custom_calls import Call, custom_calls

OPERATION = re.compile(r"^ *(?:%(\w+)(?::\d+)? = |(return) )(.*)", re.MULTILINE)
VALUE = re.compile(r"%(\w+)(?:#\d+)?")


class Operation:
    """One line of a function: its kind, where its operands are from, and its custom call, if it is one."""

    def __init__(self, line: str) -> None:
        self.kind = line.split(maxsplit=1)[0]
        self.operands = VALUE.findall(line)
        self.values = [match[0] for match in VALUE.finditer(line)]
        calls: list[Call] = custom_calls(line)
        self.call = calls[0] if calls else None


class Order:
    """The operations in the function of a program that calls a target. Their names are those of results."""

    def __init__(self, text: str, target: str) -> None:
        (function,) = (part for part in text.split("func.func")[1:] if f"@{target}(" in part)
        self.operations = {
            match[1] or match[2]: Operation(match[3]) for match in OPERATION.finditer(function)
        }

    def calls(self, target: str) -> list[str]:
        """Returns the names of all calls of a target, in the order of the text."""
        return [name for name, op in self.operations.items() if op.call and op.call.target == target]

    def call(self, name: str) -> Call:
        """Returns the call of that name."""
        call = self.operations[name].call
        assert call
        return call

    def users(self, name: str) -> list[Operation]:
        """Returns the operations that have operands from one."""
        return [op for op in self.operations.values() if name in op.operands]

    def before(self, name: str) -> set[str]:
        """Returns all operations that have to end before one begins; ``"return"`` is the end."""
        found: set[str] = set()
        to_do = [name]
        while to_do:
            operands = {*self.operations[to_do.pop()].operands} & self.operations.keys()
            to_do += operands - found
            found |= operands
        return found

    def has_order(self, *names: str) -> bool:
        """Returns whether each has to end before the next one begins."""
        return all(first in self.before(second) for first, second in itertools.pairwise(names))
