"""Loads real text without a download: Python's standard library as packed, byte-level documents."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BEGIN = 256  # the token that starts every document
VOCABULARY = 257  # 256 byte values and BEGIN
SHORTEST = 64  # bytes of the shortest document or excerpt


@dataclass(frozen=True)
class Packed:
    """Holds one sequence of packed documents.

    Attributes:
        tokens: int32[T].
        targets: int32[T], the next token of the same document.
        weights: float32[T], 0 at the last token of a document, which has no target, and 1 elsewhere.
        lengths: lengths of the documents, which sum to T.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    lengths: list[int]

    @property
    def positions(self) -> np.ndarray:
        """Returns int32[T], the position of each token in its document."""
        return np.concatenate([np.arange(length, dtype=np.int32) for length in self.lengths])


def load_documents() -> list[np.ndarray]:
    """Returns the source files of the standard library except tests, as uint8 arrays."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in (*root.glob("*.py"), *root.glob("*/*.py")) if "test" not in path.parent.name]
    texts = (np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(files))
    return [text for text in texts if len(text) >= SHORTEST]


def pack(documents: list[np.ndarray], length: int, seed: int) -> Iterator[Packed]:
    """Yields sequences of ``length`` tokens without end, filled with excerpts of random documents.

    Excerpts hold from 64 tokens up to half a sequence (log-uniform); the last one is cut to fit.
    """
    rng = np.random.default_rng(seed)
    while True:
        pieces: list[np.ndarray] = []
        left = length
        while left > 0:
            longest = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(max(SHORTEST, length // 2)))))
            pieces.append(_excerpt(documents[rng.integers(len(documents))], min(left, longest), rng))
            left -= len(pieces[-1])
        yield _packed(pieces)


def _excerpt(document: np.ndarray, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Returns BEGIN and up to ``longest - 1`` bytes from a random place of the document."""
    start = rng.integers(max(1, len(document) - longest))
    return np.concatenate([[BEGIN], document[start : start + longest - 1]]).astype(np.int32)


def _packed(pieces: list[np.ndarray]) -> Packed:
    tokens = np.concatenate(pieces)
    lengths = [len(piece) for piece in pieces]
    weights = np.ones(len(tokens), np.float32)
    weights[np.cumsum(lengths) - 1] = 0.0
    return Packed(tokens, np.roll(tokens, -1), weights, lengths)
