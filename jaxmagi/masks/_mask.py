"""`AttnMask`, a list of bands as an array inside a pytree."""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from .._checks import flag, integer, list_of
from . import _validation, geometry
from ._intersection import intersection
from .geometry import UNBOUNDED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIN_CAPACITY = 8
_MAX_CAPACITY = 2**24  # rows of bands of one mask, 400 MB

type _Integers = Sequence[Sequence[int]] | Sequence[int]
type _Range = slice | tuple[int, int] | None


class MaskType(enum.IntEnum):
    """Says which cells of a slice ``q_range x k_range`` are visible (MagiAttention's mask types).

    Below, ``i`` and ``j`` count from the beginnings of the ranges, and ``sq`` and ``sk`` are their lengths.
    """

    FULL = 0
    """Every cell."""
    CAUSAL = 1
    """``j <= i + sk - sq``: the last query sees every key (aligned at the bottom right)."""
    INV_CAUSAL = 2
    """``j >= i``: the first query sees every key (aligned at the top left)."""
    BI_CAUSAL = 3
    """``i <= j <= i + sk - sq``: both; empty when ``sq > sk``, the diagonal when ``sq == sk``."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("bands",), meta_fields=("q_len", "kv_len"))
@dataclasses.dataclass(frozen=True, eq=False)
class AttnMask:
    """Says which query sees which key, as a union of bands.

    A band ``(q0, q1, k0, k1, lo, hi)`` lets query ``q`` see key ``k`` when ``q0 <= q < q1``,
    ``k0 <= k < k1`` and ``lo <= k - q <= hi``, all in tokens. Masks are built on the host, by the builders
    of `jaxmagi.masks` or by the constructors of this class. Then they go through ``jax.jit`` like any array;
    masks with the same lengths and the same capacity share one compilation. The initialiser itself checks
    nothing: use the constructors. What reads a mask on the host refuses bands that no constructor makes; on
    devices, where nobody can read their values, `jaxmagi.attention` ignores what lies outside of the lengths.

    Masks make masks: ``a & b`` is what both let through, ``a | b`` unites two that share no cell, `crop` cuts
    a part out, `shift` places it in a larger mask, `concatenate` lines masks up and `stack` makes a batch.

    Attributes:
        bands: int32 ``[S, 6]``, or ``[B, S, 6]`` for per-example masks (see `stack`). Unused rows are all
            zero; the capacity ``S`` is a power of two unless `pad_to` sets it.
        q_len: the number of queries, at most 2**30. Static.
        kv_len: the number of keys, at most 2**30. Static.
    """

    bands: Int32[Array | np.ndarray, "*batch capacity 6"]
    q_len: int
    kv_len: int

    @classmethod
    def from_slices(
        cls,
        q_ranges: _Integers | Int[Array | np.ndarray, "slices 2"],
        k_ranges: _Integers | Int[Array | np.ndarray, "slices 2"],
        mask_types: _Integers | Int[Array | np.ndarray, " slices"],
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        check: bool = True,
    ) -> Self:
        """Makes the union of slices ``q_ranges[i] x k_ranges[i]``, which are MagiAttention's AttnSlices.

        Args:
            q_ranges: integers ``[S, 2]``, half-open ranges of queries.
            k_ranges: integers ``[S, 2]``, half-open ranges of keys.
            mask_types: `MaskType` or their integers, ``[S]``.
            q_len: the number of queries; by default the largest end of ``q_ranges``.
            kv_len: the number of keys; by default the largest end of ``k_ranges``.
            check: as in `from_bands`.

        Raises:
            ValueError: as in `from_bands`, or for an integer that is no `MaskType`.

        Examples:
            >>> types = [MaskType.CAUSAL, MaskType.FULL]
            >>> AttnMask.from_slices([(0, 2), (2, 4)], [(0, 2), (0, 4)], types).area()
            11
        """
        q, k = (
            _validation.integer_array(ranges, name, columns=2)
            for ranges, name in ((q_ranges, "q_ranges"), (k_ranges, "k_ranges"))
        )
        types = _validation.integer_array(mask_types, "mask_types")
        if not len(q) == len(k) == len(types):
            raise ValueError(
                "q_ranges, k_ranges and mask_types must have one length, "
                f"but they have {len(q)}, {len(k)} and {len(types)}."
            )
        _validation.reject(
            (types < 0) | (types > 3),
            lambda i: f"band {i}: mask_types[{i}] = {types[i]} is no MaskType (0 to 3).",
        )
        hi = np.where(types & MaskType.CAUSAL, k[:, 1] - q[:, 1], UNBOUNDED)
        lo = np.where(types & MaskType.INV_CAUSAL, k[:, 0] - q[:, 0], -UNBOUNDED)
        return cls.from_bands(
            np.column_stack([q, k, lo, hi]),
            q_len=max(0, q[:, 1].max(initial=0)) if q_len is None else q_len,
            kv_len=max(0, k[:, 1].max(initial=0)) if kv_len is None else kv_len,
            check=check,
        )

    @classmethod
    def from_bands(
        cls,
        bands: _Integers | Int[Array | np.ndarray, "bands 6"],
        *,
        q_len: int,
        kv_len: int,
        check: bool = True,
    ) -> Self:
        """Makes the union of bands.

        Empty bands are dropped, and limits beyond ``±masks.UNBOUNDED`` are stored as ``±masks.UNBOUNDED``.

        Args:
            bands: integers ``[S, 6]``, rows ``(q0, q1, k0, k1, lo, hi)``.
            q_len: the number of queries, at most 2**30.
            kv_len: the number of keys, at most 2**30.
            check: whether to raise when two bands share a cell (exact, O(S log² S)). Without the check a
                shared cell counts once per band: its softmax weight is multiplied.

        Raises:
            ValueError: a range is reversed or out of bounds, an array does not hold integers or has another
                shape, a length is out of bounds, or two bands share a cell.
        """
        q_len, kv_len = integer(q_len, "q_len"), integer(kv_len, "kv_len")
        array = _validation.integer_array(bands, "bands", columns=6)
        _validation.check_ranges(array[:, 0:2], "query", q_len)
        _validation.check_ranges(array[:, 2:4], "key", kv_len)
        array[:, 4:] = np.clip(array[:, 4:], -UNBOUNDED, UNBOUNDED)
        if flag(check, "check"):
            _validation.check_overlap(array)
        array = array[~geometry.is_empty(array)].astype(np.int32)
        return cls(_pad(array, _bucket(len(array))), q_len, kv_len)

    @classmethod
    def concatenate(cls, masks: Sequence["AttnMask"]) -> Self:
        """Makes the block-diagonal mask of sequences one after another, none of which sees another.

        This folds a batch into one sequence, which is how context parallelism takes a batch.

        Raises:
            ValueError: there is no mask, or one is traced or holds per-example bands.
        """
        masks = list_of(masks, AttnMask, "masks")
        arrays = _single_bands(masks, "concatenate")
        q_ends, k_ends = (
            np.cumsum(sizes) for sizes in zip(*((m.q_len, m.kv_len) for m in masks), strict=True)
        )
        q_len, kv_len = integer(q_ends[-1], "q_len"), integer(k_ends[-1], "kv_len")
        parts = [
            geometry.shift(array, q_end - mask.q_len, k_end - mask.kv_len)
            for array, mask, q_end, k_end in zip(arrays, masks, q_ends, k_ends, strict=True)
        ]
        bands = np.concatenate(parts)
        bands = bands[bands.any(axis=-1)]
        return cls(_pad(bands, _bucket(len(bands))), q_len, kv_len)

    @classmethod
    def stack(cls, masks: Sequence["AttnMask"]) -> Self:
        """Makes per-example masks: bands ``[B, S, 6]`` with the largest capacity ``S`` of the masks.

        Raises:
            ValueError: there is no mask, their lengths differ, or one is traced or already stacked.
        """
        masks = list_of(masks, AttnMask, "masks")
        arrays = _single_bands(masks, "stack")
        sizes = sorted({(mask.q_len, mask.kv_len) for mask in masks})
        if len(sizes) > 1:
            raise ValueError(f"stack needs masks of one (q_len, kv_len), but there are {sizes}.")
        capacity = max(len(array) for array in arrays)
        return cls(np.stack([_pad(array, capacity) for array in arrays]), *sizes[0])

    def __and__(self, other: "AttnMask") -> "AttnMask":
        """Returns the mask where a query sees a key if it does in both masks, in closed form.

        A cell that several bands of a mask cover (``check=False``) counts once for each pair of bands.

        Raises:
            ValueError: the lengths of the masks differ, or one is traced or stacked.
            NotImplementedError: more than 2**22 pairs of bands have rows in common, and as many have keys.

        Examples:
            >>> from jaxmagi import masks
            >>> (masks.sliding_window(4, 1) & masks.documents([2, 2], "full")).to_dense().astype(int)
            array([[1, 0, 0, 0],
                   [1, 1, 0, 0],
                   [0, 0, 1, 0],
                   [0, 0, 1, 1]])
        """
        if not isinstance(other, AttnMask):
            return NotImplemented
        bands = intersection(*_bands_of_two(self, other, "&"))
        return AttnMask.from_bands(bands, q_len=self.q_len, kv_len=self.kv_len, check=False)

    def __or__(self, other: "AttnMask") -> "AttnMask":
        """Returns the mask where a query sees a key if it does in one of two masks that share no cell.

        Raises:
            ValueError: a query sees a key in both masks, or twice in one of them, the lengths of the masks
                differ, or one is traced or stacked.

        Examples:
            >>> from jaxmagi import masks
            >>> sink = masks.full(5, 1).shift(kv_len=5)  # everybody sees the first key, besides a window
            >>> (sink | masks.sliding_window(5, 1).crop(keys=(1, 5)).shift(keys=1)).to_dense().astype(int)
            array([[1, 0, 0, 0, 0],
                   [1, 1, 0, 0, 0],
                   [1, 1, 1, 0, 0],
                   [1, 0, 1, 1, 0],
                   [1, 0, 0, 1, 1]])
        """
        if not isinstance(other, AttnMask):
            return NotImplemented
        first, second = _bands_of_two(self, other, "|")
        _validation.check_disjoint(first, second)
        bands = np.concatenate([first, second])
        return AttnMask.from_bands(bands, q_len=self.q_len, kv_len=self.kv_len, check=False)

    def crop(self, queries: _Range = None, keys: _Range = None) -> "AttnMask":
        """Returns the part of the mask for a range of queries and of keys, which count from 0 in it.

        Args:
            queries: a slice or ``(begin, end)`` inside the mask; by default all queries.
            keys: the same of keys.

        Raises:
            ValueError: a range is reversed or not inside the mask (slices are not cut, and negative numbers
                do not count from the end), or the mask is traced or stacked.

        Examples:
            >>> from jaxmagi import masks
            >>> masks.causal(4).crop(queries=slice(2, None), keys=(1, 4)).to_dense().astype(int)
            array([[1, 1, 0],
                   [1, 1, 1]])
        """
        (bands,) = _single_bands([self], "crop")
        q0, q1 = _validation.token_range(queries, "queries", self.q_len)
        k0, k1 = _validation.token_range(keys, "keys", self.kv_len)
        part = geometry.shift(geometry.crop(bands, q0, q1, k0, k1), -q0, -k0)
        return AttnMask.from_bands(part, q_len=q1 - q0, kv_len=k1 - k0, check=False)

    def shift(
        self, queries: int = 0, keys: int = 0, *, q_len: int | None = None, kv_len: int | None = None
    ) -> "AttnMask":
        """Returns the mask moved down by ``queries`` and right by ``keys``, in a mask of any lengths.

        What query ``q`` sees at key ``k``, query ``q + queries`` sees at key ``k + keys``; nothing else is
        visible. Either may be negative.

        Args:
            queries: added to the positions of queries.
            keys: added to the positions of keys.
            q_len: the number of queries of the result; by default that of the mask and ``queries``.
            kv_len: the number of keys of the result; by default that of the mask and ``keys``.

        Raises:
            ValueError: a visible cell would leave the result (`crop` first), a length is out of bounds, or
                the mask is traced or stacked.

        Examples:
            >>> from jaxmagi import masks
            >>> masks.full(1, 2).shift(1, 1, kv_len=4).to_dense().astype(int)
            array([[0, 0, 0, 0],
                   [0, 1, 1, 0]])
        """
        (bands,) = _single_bands([self], "shift")
        farthest = UNBOUNDED - 1
        queries = integer(queries, "queries", minimum=-farthest, maximum=farthest)
        keys = integer(keys, "keys", minimum=-farthest, maximum=farthest)
        return AttnMask.from_bands(
            geometry.shift(geometry.tighten(bands), queries, keys),
            q_len=self.q_len + queries if q_len is None else q_len,
            kv_len=self.kv_len + keys if kv_len is None else kv_len,
            check=False,
        )

    @property
    def num_bands(self) -> int:
        """Returns the number of bands that have a cell (summed over the examples of a stacked mask)."""
        return int((~geometry.is_empty(self._host_bands())).sum())

    def area(self) -> int:
        """Returns the number of visible cells in closed form (summed over the examples of a stacked mask)."""
        return sum(geometry.area(self._host_bands()).ravel().tolist())

    def to_dense(self) -> Bool[np.ndarray, "*batch q_len kv_len"]:
        """Returns which cells are visible."""
        bands = self._host_bands()
        dense = np.zeros((*bands.shape[:-2], self.q_len, self.kv_len), bool)
        for example in np.ndindex(bands.shape[:-2]):
            dense[example] = geometry.to_dense(bands[example], self.q_len, self.kv_len) > 0
        return dense

    def pad_to(self, capacity: int) -> "AttnMask":
        """Returns the mask with room for exactly ``capacity`` bands, so that masks share a compilation.

        Raises:
            ValueError: ``capacity`` is smaller than the number of rows that the bands take, or above 2**24.
        """
        bands = self._host_bands()
        examples = tuple(range(bands.ndim - 2))
        used = 1 + np.flatnonzero(bands.any(axis=(*examples, -1))).max(initial=-1)
        capacity = integer(capacity, "capacity", maximum=_MAX_CAPACITY)
        if capacity < used:
            raise ValueError(f"capacity {capacity} is too small: the mask's bands take {used} rows.")
        return dataclasses.replace(self, bands=_pad(bands[..., :used, :], capacity))

    def draw(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the mask: queries downwards, keys rightwards, one coloured shape per band.

        Args:
            ax: the matplotlib axes to draw into; by default those of a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is missing (``pip install jaxmagi[plot]``).
            ValueError: the mask is traced or stacked.
        """
        from ._draw import draw_bands

        (bands,) = _single_bands([self], "draw")
        return draw_bands(bands, self.q_len, self.kv_len, ax)

    def _host_bands(self) -> np.ndarray:
        return _validation.host_bands(self.bands, self.q_len, self.kv_len)


def _single_bands(masks: Sequence[AttnMask], purpose: str) -> list[np.ndarray]:
    """Returns the bands of masks; raises ValueError if one is stacked."""
    arrays = [mask._host_bands() for mask in masks]
    if not arrays:
        raise ValueError(f"{purpose} needs at least one mask.")
    for i, array in enumerate(arrays):
        if array.ndim != 2:
            raise ValueError(
                f"{purpose} takes masks with bands [S, 6], but those of mask {i} are {array.shape}."
            )
    return arrays


def _bands_of_two(first: AttnMask, second: AttnMask, operator: str) -> list[np.ndarray]:
    """Returns the bands of two masks; raises ValueError unless they have the same lengths."""
    sizes = [(mask.q_len, mask.kv_len) for mask in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{operator} needs masks of one (q_len, kv_len), but they have {sizes[0]} and {sizes[1]}."
        )
    return _single_bands([first, second], operator)


def _bucket(count: int) -> int:
    """Returns the power of two that holds ``count`` bands, so that jit sees few shapes."""
    return max(_MIN_CAPACITY, 1 << (count - 1).bit_length())


def _pad(bands: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int32 ``[..., capacity, 6]`` with zero rows added, read-only because jax may alias it."""
    padded = np.zeros((*bands.shape[:-2], capacity, 6), np.int32)
    padded[..., : bands.shape[-2], :] = bands
    padded.flags.writeable = False
    return padded
