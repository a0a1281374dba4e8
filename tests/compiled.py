"""Collectives in a compiled program: what its devices send each other."""

import re
from collections import Counter

COLLECTIVE = re.compile(
    r" = (?P<types>\([^=]*?\)|\S+) "
    r"(?P<name>all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|"
    r"reduce-scatter)(?:-start)?\("
)
ARRAY = re.compile(r"\b([a-z]+\d+\[[\d,]*\])")


def collectives(text: str | None) -> Counter[str]:
    """Counts a program's collectives by name and by what a device gets, as in "all-gather f32[2,40,4,8]".

    A collective of several arrays, into which XLA combines some, counts once for each of them.
    """
    assert text is not None
    return Counter(
        f"{match['name']} {array}"
        for match in COLLECTIVE.finditer(text)
        for array in ARRAY.findall(match["types"])
    )


def collective_names(text: str | None) -> Counter[str]:
    """Counts the arrays that collectives move, by the collectives' names alone."""
    counts: Counter[str] = Counter()
    for key, count in collectives(text).items():
        counts[key.split()[0]] += count
    return counts
