"""What comes before what in a lowered program, by the data that one operation has from another."""

import functools
import re

from .custom_calls import Call, custom_calls

OPERATION = re.compile(r"^ *(?:%(\w+)(?::\d+)? = |(return) )(.*)", re.MULTILINE)
VALUE = re.compile(r"%(\w+)(?:#\d+)?")


class Operation:
    """One line of a function: what it has operands from, and the custom call that it makes, if any."""

    def __init__(self, line: str) -> None:
        self.operands = VALUE.findall(line)
        self.values = [match[0] for match in VALUE.finditer(line)]
        calls: list[Call] = custom_calls(line)
        self.call = calls[0] if calls else None


class Order:
    """Of the operations in the function of a program that makes calls of a target. Names are those of results."""

    def __init__(self, text: str, target: str) -> None:
        (function,) = (part for part in text.split("func.func")[1:] if f"@{target}(" in part)
        self.operations = {
            match[1] or match[2]: Operation(match[3]) for match in OPERATION.finditer(function)
        }

    def calls(self, target: str) -> list[str]:
        """The names of all calls of a target, in the order of the text."""
        return [name for name, op in self.operations.items() if op.call and op.call.target == target]

    def call(self, name: str) -> Call:
        """The call of that name."""
        call = self.operations[name].call
        assert call
        return call

    @functools.cache  # noqa: B019
    def before(self, name: str) -> frozenset[str]:
        """All operations that have to be over before one begins; ``"return"`` is the end."""
        operands = [operand for operand in self.operations[name].operands if operand in self.operations]
        return frozenset(operands).union(*map(self.before, operands))

    def has_order(self, *names: str) -> bool:
        """Whether each has to be over before the next one begins."""
        return all(first in self.before(second) for first, second in zip(names, names[1:], strict=False))
