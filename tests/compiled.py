"""Counts collectives in a compiled program: what its devices send each other."""

import re
from collections import Counter

COLLECTIVE = re.compile(
    r" = (?P<types>\((?:[^=]|index=)*?\)|\S+) "  # a tuple of many arrays has comments in it, /*index=5*/
    r"(?P<name>all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|"
    r"reduce-scatter)(?P<start>-start)?\("
)
ARRAY = re.compile(r"\b([a-z]+\d+\[[\d,]*\])")


def collectives(text: str | None) -> Counter[str]:
    """Counts a program's collectives by name and by what a device gets, as in "all-gather f32[2,40,4,8]".

    A collective of several arrays, into which XLA combines some, counts once for each of them.
    """
    assert text is not None
    return Counter(
        f"{match['name']} {array}" for match in COLLECTIVE.finditer(text) for array in _results(match)
    )


def _results(match: re.Match[str]) -> list[str]:
    """Returns the types of a collective's results. On GPUs the type of a start has those of operands too."""
    arrays = ARRAY.findall(match["types"])
    has_operands = match["start"] and match["name"] in ("all-gather", "collective-permute")
    return arrays[len(arrays) // 2 :] if has_operands else arrays


def collective_names(text: str | None) -> Counter[str]:
    """Counts the arrays that collectives move, by the collectives' names alone."""
    counts: Counter[str] = Counter()
    for key, count in collectives(text).items():
        counts[key.split()[0]] += count
    return counts
