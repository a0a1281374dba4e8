"""The named masks and shapes that are measured, and that tests of GPUs check too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxmagi import AttnMask, masks
from tests.cases import document_lengths

HEADS, KV_HEADS = 64, 8

type Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Full:
    length: int

    def mask(self) -> AttnMask:
        return masks.full(self.length)


@dataclass(frozen=True)
class Causal:
    length: int

    def mask(self) -> AttnMask:
        return masks.causal(self.length)


@dataclass(frozen=True)
class Documents:
    """Packed documents."""

    lengths: tuple[int, ...]
    causal: bool

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def mask(self) -> AttnMask:
        return masks.documents(self.lengths, "causal" if self.causal else "full")


@dataclass(frozen=True)
class Window:
    """Each token sees itself and ``left`` tokens before it."""

    length: int
    left: int

    def mask(self) -> AttnMask:
        return masks.sliding_window(self.length, self.left)


@dataclass(frozen=True)
class SharedPrefix:
    """A prompt and branches of one size, all causal."""

    prefix: int
    branches: int
    size: int

    @property
    def length(self) -> int:
        return self.prefix + self.branches * self.size

    def mask(self) -> AttnMask:
        return masks.shared_prefix(self.prefix, [self.size] * self.branches)


@dataclass(frozen=True)
class Video:
    """Chunks of frames; each sees itself and all chunks before it."""

    chunks: int
    size: int

    @property
    def length(self) -> int:
        return self.chunks * self.size

    def mask(self) -> AttnMask:
        return masks.video(self.chunks, self.size)


type Pattern = Full | Causal | Documents | Window | SharedPrefix | Video

MASKS: dict[str, Callable[[], Pattern]] = {
    "documents causal": lambda: Documents(tuple(document_lengths(32_768)), causal=True),
    "documents full": lambda: Documents(tuple(document_lengths(32_768)), causal=False),
    "documents 16x2048 causal": lambda: Documents((2048,) * 16, causal=True),
    "window 1023": lambda: Window(32_768, 1023),
    "shared prefix 4k+14x2k": lambda: SharedPrefix(4096, 14, 2048),
    "video 4x21600": lambda: Video(4, 21_600),
}
SHORT_DOCUMENTS = "documents mean 256 causal"
HELD_AGAINST = {
    "video 4x21600": "full 32k D128",
    "shared prefix 4k+14x2k": "causal 32k D128",
}
"""Forward workloads on which our rate is required to come near our rate on another one."""


@dataclass(frozen=True)
class Workload:
    """A mask at 64 query and 8 key heads of given dimensions, batch 1."""

    name: str
    pattern: Pattern
    dim: int = 128
    v_dim: int = 128

    @property
    def is_short(self) -> bool:
        """Says that a pass takes so little time that the host has to be kept out of it."""
        return self.pattern.length <= 4096

    def query_bytes(self) -> int:
        """Returns the bytes of the queries of a layer in bfloat16."""
        return 2 * self.pattern.length * HEADS * self.dim

    def flops(self, direction: Direction) -> int:
        """Counts products over the visible cells, two forward and five backward, a multiply-add as two."""
        forward, backward = self.dim + self.v_dim, 3 * self.dim + 2 * self.v_dim
        per_cell = forward if direction == "forward" else backward
        return 2 * self.pattern.mask().area() * HEADS * per_cell


def _dense(
    kind: type[Full] | type[Causal], length: int, dim: int = 128, v_dim: int | None = None
) -> Workload:
    v_dim = dim if v_dim is None else v_dim
    dims = str(dim) if dim == v_dim else f"{dim}/{v_dim}"
    return Workload(f"{kind.__name__.lower()} {length // 1024}k D{dims}", kind(length), dim, v_dim)


def _short_documents() -> Documents:
    """Draws documents of any lengths, 256 on average: tiles begin and end within them."""
    length, shortest, longest = 32_768, 16, 496
    drawn = np.random.default_rng(0).integers(shortest, longest + 1, length // shortest)
    ends = np.unique(np.cumsum(drawn).clip(max=length))
    return Documents(tuple(np.diff(ends, prepend=0).tolist()), causal=True)


def workloads() -> list[Workload]:
    """Returns all rows of the benchmark of attention."""
    rows = [_dense(kind, 8192) for kind in (Full, Causal)]
    rows += [_dense(Causal, length) for length in (1024, 2048, 4096)]
    rows += [_dense(kind, 16_384, dim) for dim in (64, 256) for kind in (Full, Causal)]
    rows += [Workload(name, pattern()) for name, pattern in MASKS.items()]
    rows.append(Workload(SHORT_DOCUMENTS, _short_documents()))
    rows += [Workload(f"{name} D64", pattern(), 64, 64) for name, pattern in MASKS.items()]
    rows += [_dense(kind, 32_768) for kind in (Full, Causal)]
    others = ((96, 96), (192, 192), (192, 128))
    return rows + [_dense(kind, 16_384, *dims) for dims in others for kind in (Full, Causal)]


def held_against(workload: Workload, direction: Direction) -> Workload | None:
    """Returns the workload of `HELD_AGAINST`."""
    name = HELD_AGAINST.get(workload.name) if direction == "forward" else None
    if name is None:
        return None
    return next(other for other in workloads() if other.name == name)


def shuffled_documents(rng: np.random.Generator, length: int, count: int) -> NDArray[np.int32]:
    """Draws bands [count, 6] of causal documents of any lengths, in any order."""
    cuts = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False))
    mask = masks.documents(np.diff(cuts, prepend=0, append=length))
    return rng.permutation(np.asarray(mask.bands)[:count])  # the rest is padding
