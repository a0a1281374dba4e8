"""Builders of masks, each of which says which query ``q`` sees which key ``k``.

Lengths are in tokens. Every builder makes bands that share no cell, so none runs the overlap check.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from .._checks import flag, integer
from ._mask import AttnMask
from ._tree import depths, tree_bands
from ._validation import integer_array, lengths as checked_lengths, reject
from .geometry import UNBOUNDED

_MAX_PAIRS = 2**22
_MAX_DEPTH = 64  # of a tree, which bounds the number of bands of each segment

type Window = tuple[int, int]
"""Numbers of keys to the left and to the right of the query's own key."""


def full(q_len: int, kv_len: int | None = None) -> AttnMask:
    """Returns the mask under which every query sees every key.

    Args:
        q_len: the number of queries.
        kv_len: the number of keys; by default ``q_len``.
    """
    q_len, kv_len = _two_lengths(q_len, kv_len, "q_len")
    return _mask([_band(0, q_len, 0, kv_len)], q_len, kv_len)


def causal(q_len: int, kv_len: int | None = None) -> AttnMask:
    """Returns the mask where ``q`` sees ``k`` when ``k <= q + kv_len - q_len`` (bottom-right aligned).

    The last query sees every key. With ``kv_len < q_len`` the first ``q_len - kv_len`` queries see none.

    Args:
        q_len: the number of queries.
        kv_len: the number of keys; by default ``q_len``.

    Examples:
        >>> causal(2, 4).to_dense().astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    return sliding_window(q_len, -1, 0, kv_len=kv_len)


def sliding_window(length: int, left: int, right: int = 0, *, kv_len: int | None = None) -> AttnMask:
    """Returns the mask where ``q`` sees itself, the ``left`` keys before and the ``right`` keys after it.

    With ``p = q + kv_len - length`` (bottom-right aligned), ``q`` sees ``p - left <= k <= p + right``. A
    model whose "window of W tokens" counts the query itself (Gemma, gpt-oss, Hugging Face) needs
    ``left = W - 1``.

    Args:
        length: the number of queries.
        left: keys before the query's own; -1 = all of them.
        right: keys after the query's own; -1 = all of them.
        kv_len: the number of keys; by default ``length``.

    Examples:
        >>> sliding_window(4, 1).to_dense().astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
    """
    length, kv_len = _two_lengths(length, kv_len, "length")
    lo, hi = _limits((left, right), kv_len - length)
    return _mask([_band(0, length, 0, kv_len, lo, hi)], length, kv_len)


def documents(
    lengths: Sequence[int] | Int[Array | np.ndarray, " documents"], inner: str | Window = "causal"
) -> AttnMask:
    """Returns the mask of packed documents: each query sees only keys of its own document.

    Args:
        lengths: tokens of each document, in order; zeros are allowed.
        inner: the mask inside a document: ``"causal"`` (``k <= q``), ``"full"``, or ``(left, right)``
            as in `sliding_window`.

    Examples:
        >>> documents([1, 2]).to_dense().astype(int)
        array([[1, 0, 0],
               [0, 1, 0],
               [0, 1, 1]])
    """
    ends = np.cumsum(checked_lengths(lengths, "lengths"))
    begins = np.concatenate([[0], ends[:-1]])
    total = int(ends[-1]) if ends.size else 0
    return _mask([_band(begins, ends, begins, ends, *_inner_limits(inner))], total, total)


def from_segment_ids(
    segment_ids: Sequence[int] | Int[Array | np.ndarray, " T"], *, causal: bool = True, padding_id: int = 0
) -> AttnMask:
    """Returns the mask where ``q`` sees ``k`` of the same segment id and, if causal, ``k <= q``.

    Padding sees nothing and is seen by nothing. A segment need not be contiguous: separate runs of one id see
    one another, at the cost of one band per pair of runs.

    Args:
        segment_ids: integers ``[T]`` on the host. For a batch ``[B, T]``, `AttnMask.stack` the masks of its
            rows.
        causal: whether keys after the query are hidden.
        padding_id: the id of padding (0 in MaxText and T5X, -1 in kvax).

    Raises:
        NotImplementedError: runs of one id form more than 2**22 pairs of a run of queries and a run of keys,
            the latter not behind the former if causal.

    Examples:
        >>> from_segment_ids([1, 2, 1, 0]).to_dense().astype(int)
        array([[1, 0, 0, 0],
               [0, 1, 0, 0],
               [1, 0, 1, 0],
               [0, 0, 0, 0]])
    """
    causal = flag(causal, "causal")
    ids = integer_array(segment_ids, "segment_ids")
    integer(len(ids), "the length of segment_ids")
    padding_id = integer(padding_id, "padding_id", minimum=-(2**63), maximum=2**63 - 1)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    ends = np.append(starts[1:], len(ids))
    kept = ids[starts] != padding_id
    starts, ends = starts[kept], ends[kept]
    q, k = _pairs_of_equal(ids[starts], causal=causal)
    hi = 0 if causal else UNBOUNDED
    return _mask([_band(starts[q], ends[q], starts[k], ends[k], hi=hi)], len(ids), len(ids))


def block_causal(length: int, block: int) -> AttnMask:
    """Returns the mask where ``q`` sees its own block and all before it: ``k // block <= q // block``.

    Args:
        length: the number of tokens.
        block: tokens of a block; the last block may be shorter.

    Examples:
        >>> block_causal(3, 2).to_dense().astype(int)
        array([[1, 1, 0],
               [1, 1, 0],
               [1, 1, 1]])
    """
    starts, ends = _blocks(length, block, "block")
    return _mask([_band(starts, ends, 0, ends)], length, length)


def prefix_lm(length: int, prefix: int) -> AttnMask:
    """Returns the mask where ``q`` sees ``k`` when ``k <= q`` or both are in the prefix.

    Args:
        length: the number of tokens, prefix included.
        prefix: the tokens of the prefix, at most ``length``.
    """
    length = integer(length, "length")
    prefix = integer(prefix, "prefix", maximum=length)
    return _mask([_band(0, prefix, 0, prefix), _band(prefix, length, 0, length, hi=0)], length, length)


def shared_prefix(prefix: int, branches: Sequence[int] | Int[Array | np.ndarray, " branches"]) -> AttnMask:
    """Returns the mask of a prompt and independent branches that continue it, all packed (RL groups).

    A prompt token sees the prompt up to itself. A branch token sees the whole prompt and its own branch up to
    itself, and nothing of the other branches.

    Args:
        prefix: tokens of the prompt.
        branches: tokens of each branch, in order; zeros are allowed.

    Examples:
        >>> shared_prefix(1, [1, 2]).to_dense().astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 0, 1, 1]])
    """
    prefix = integer(prefix, "prefix")
    sizes = checked_lengths(branches, "branches")
    total = integer(prefix + sizes.sum(), "the sum of prefix and branches")
    ends = prefix + np.cumsum(sizes)
    begins = ends - sizes
    prompt = _band(0, total, 0, prefix, hi=0)
    return _mask([prompt, _band(begins, ends, begins, ends, hi=0)], total, total)


def prefix_tree(
    parents: Sequence[int] | Int[Array | np.ndarray, " segments"],
    lengths: Sequence[int] | Int[Array | np.ndarray, " segments"],
) -> AttnMask:
    """Returns the mask of a tree of token segments, all packed (branching RL rollouts, beam search).

    A token sees its own segment up to itself and all tokens of the segment's ancestors. Several roots make a
    forest, whose trees do not see one another.

    In depth-first order, where each subtree is contiguous, there is one band at most for each segment, and an
    only child shares its parent's. In any other order there is one at most for each segment and each run of
    consecutive tokens that see it, hence no more than the tree's depth for each segment.

    Args:
        parents: the index of each segment's parent, which comes before the segment; -1 for a root.
        lengths: tokens of each segment, in order; zeros are allowed.

    Raises:
        ValueError: a parent does not come before its child, or a segment has 64 ancestors or more.
        NotImplementedError: the order of the segments needs more than 2**22 bands.

    Examples:
        >>> prefix_tree([-1, 0, 1, 0], [1, 1, 2, 1]).to_dense().astype(int)
        array([[1, 0, 0, 0, 0],
               [1, 1, 0, 0, 0],
               [1, 1, 1, 0, 0],
               [1, 1, 1, 1, 0],
               [1, 0, 0, 0, 1]])
    """
    above, sizes = integer_array(parents, "parents"), checked_lengths(lengths, "lengths")
    if len(above) != len(sizes):
        raise ValueError(
            f"parents and lengths must have one length, but they have {len(above)} and {len(sizes)}."
        )
    reject(
        (above < -1) | (above >= np.arange(len(above))),
        lambda i: f"parents[{i}] = {above[i]} is neither -1 nor the index of a segment before segment {i}.",
    )
    depth = depths(above)
    if depth.max(initial=0) > _MAX_DEPTH:
        raise ValueError(
            f"the tree's depth must be at most {_MAX_DEPTH}, "
            f"but it is {depth.max()}, at segment {depth.argmax()}."
        )
    total = int(sizes.sum())
    return _mask([tree_bands(above, sizes, depth)], total, total)


def chunked_causal(length: int, chunk: int) -> AttnMask:
    """Returns the mask where ``q`` sees ``k <= q`` of the same chunk (Llama 4's local layers).

    Args:
        length: the number of tokens.
        chunk: tokens of a chunk; the last chunk may be shorter.
    """
    starts, ends = _blocks(length, chunk, "chunk")
    return _mask([_band(starts, ends, starts, ends, hi=0)], length, length)


def video(num_chunks: int, tokens_per_chunk: int, kv_range: int | None = None) -> AttnMask:
    """Returns MAGI-1's video mask: chunk ``j`` sees chunks ``max(0, j + 1 - kv_range)`` to ``j`` in full.

    Args:
        num_chunks: the number of chunks.
        tokens_per_chunk: tokens of each chunk.
        kv_range: how many chunks a chunk sees, its own included, at least 1; by default all up to its own.
    """
    size, count = integer(tokens_per_chunk, "tokens_per_chunk"), integer(num_chunks, "num_chunks")
    length = integer(count * size, "num_chunks * tokens_per_chunk")
    chunk = np.arange(count if length else 0)
    seen = UNBOUNDED if kv_range is None else integer(kv_range, "kv_range", minimum=1)
    first = np.maximum(0, chunk + 1 - seen)
    return _mask([_band(chunk * size, (chunk + 1) * size, first * size, (chunk + 1) * size)], length, length)


def _mask(parts: list[np.ndarray], q_len: int, kv_len: int) -> AttnMask:
    return AttnMask.from_bands(np.concatenate(parts), q_len=q_len, kv_len=kv_len, check=False)


def _band(q0: Any, q1: Any, k0: Any, k1: Any, lo: Any = -UNBOUNDED, hi: Any = UNBOUNDED) -> np.ndarray:
    """Returns bands int64 ``[n, 6]`` from numbers and arrays ``[n]``."""
    return np.stack(np.broadcast_arrays(*np.atleast_1d(q0, q1, k0, k1, lo, hi)), axis=-1).astype(np.int64)


def _two_lengths(q_len: int, kv_len: int | None, q_name: str) -> tuple[int, int]:
    q_len = integer(q_len, q_name)
    return q_len, q_len if kv_len is None else integer(kv_len, "kv_len")


def _limits(window: Window, offset: int = 0) -> tuple[int, int]:
    """Returns ``(lo, hi)`` of a window of keys around key ``q + offset``."""
    left, right = (
        integer(size, name, minimum=-1) for size, name in zip(window, ("left", "right"), strict=True)
    )
    return (-UNBOUNDED if left == -1 else offset - left), (UNBOUNDED if right == -1 else offset + right)


def _inner_limits(inner: str | Window) -> tuple[int, int]:
    if isinstance(inner, tuple | list) and len(inner) == 2:
        return _limits((inner[0], inner[1]))
    limits = {"causal": (-UNBOUNDED, 0), "full": (-UNBOUNDED, UNBOUNDED)}
    if not isinstance(inner, str) or inner not in limits:
        raise ValueError(f"inner must be 'causal', 'full' or (left, right), but it is {inner!r}.")
    return limits[inner]


def _blocks(length: int, block: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the beginnings and ends of blocks, of which the last may be shorter."""
    length = integer(length, "length")
    starts = np.arange(0, length, integer(block, name, minimum=1))
    return starts, np.minimum(starts + block, length)


def _pairs_of_equal(values: np.ndarray, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns all pairs of indices ``(i, j)`` with ``values[i] == values[j]`` and, if causal, ``j <= i``."""
    order = np.argsort(values, kind="stable")
    _, group, counts = np.unique(values[order], return_inverse=True, return_counts=True)
    begins = np.cumsum(counts) - counts
    partners = np.arange(len(values)) - begins[group] + 1 if causal else counts[group]
    if partners.sum() > _MAX_PAIRS:
        raise NotImplementedError(
            f"{len(values)} runs of {len(counts)} segments need {partners.sum()} bands, "
            f"more than {_MAX_PAIRS}: sort the tokens by segment."
        )
    first = np.repeat(np.arange(len(values)), partners)
    place = np.arange(len(first)) - np.repeat(np.cumsum(partners) - partners, partners)
    return order[first], order[begins[group[first]] + place]
