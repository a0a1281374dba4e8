"""Computes dense fp64 attention on the host: the reference that every implementation is compared with."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..masks import AttnMask
from ..masks._validation import host_bands

type _Float = NDArray[np.float64]


class _Scores(NamedTuple):
    """The cells [q_len, kv_len] of one head of one example."""

    counts: _Float  # number of bands that cover the cell
    logits: _Float
    slope: _Float  # derivative of the soft cap


def _counts(bands: NDArray[np.integer], q_len: int, kv_len: int) -> _Float:
    """Returns how many bands cover each cell [q_len, kv_len]."""
    count = np.zeros((q_len, kv_len))
    for q0, q1, k0, k1, lo, hi in np.asarray(bands, np.int64):
        offset = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        count[q0:q1, k0:k1] += (lo <= offset) & (offset <= hi)
    return count


def _scores(q: _Float, k: _Float, count: _Float, scale: float, soft_cap: float | None) -> _Scores:
    with np.errstate(invalid="ignore"):  # 0 · inf in masked cells
        logits = np.where(count > 0, scale * (q @ k.T), -np.inf)
    slope = np.ones_like(logits)
    if soft_cap is not None:
        capped = np.tanh(logits / soft_cap)
        logits, slope = np.where(count > 0, soft_cap * capped, -np.inf), 1 - capped**2
    return _Scores(count, logits, slope)


def _log_sum_exp(scores: _Scores, sink: float) -> _Float:
    """Returns the log-sum-exp of each row and its sink; -inf for rows without a finite logit."""
    visible = ~np.isneginf(scores.logits).all(axis=1)
    row_max = np.maximum(np.where(visible, scores.logits.max(axis=1, initial=-np.inf), 0.0), sink)
    row_sum = (scores.counts * np.exp(scores.logits - row_max[:, None])).sum(axis=1) + np.exp(sink - row_max)
    return np.where(visible, row_max + np.log(np.where(visible, row_sum, 1.0)), -np.inf)


def _probabilities(scores: _Scores, lse: _Float) -> _Float:
    finite = np.where(np.isneginf(lse), 0.0, lse)
    return scores.counts * np.exp(scores.logits - finite[:, None])


class _Problem:
    """Holds operands in fp64 with a batch axis. Fully masked rows and keys are 0: NaN does not spread."""

    def __init__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        mask: AttnMask | ArrayLike,
        scale: float | None,
        soft_cap: float | None,
        sinks: ArrayLike | None,
    ) -> None:
        self.batched = np.ndim(query) == 4
        self.q, self.k, self.v = (self.add_batch(x) for x in (query, key, value))
        is_mask = isinstance(mask, AttnMask)
        bands = host_bands(mask.bands, mask.q_len, mask.kv_len) if is_mask else np.asarray(mask)
        bands = bands if bands.ndim == 3 else bands[None]
        counts = [_counts(one, self.q.shape[1], self.k.shape[1]) for one in bands]
        self.counts = counts if len(counts) > 1 else counts * self.q.shape[0]
        self.scale = self.q.shape[-1] ** -0.5 if scale is None else scale
        self.soft_cap = soft_cap
        heads = self.q.shape[2]
        self.sinks = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
        self.group = heads // self.k.shape[2]
        for example, count in enumerate(self.counts):
            self.q[example, ~(count > 0).any(axis=1)] = 0
            self.k[example, ~(count > 0).any(axis=0)] = 0
            self.v[example, ~(count > 0).any(axis=0)] = 0

    def add_batch(self, x: ArrayLike) -> _Float:
        copy = np.array(x, np.float64)
        return copy if self.batched else copy[None]

    def drop_batch(self, x: _Float) -> _Float:
        return x if self.batched else x[0]

    def heads(self) -> list[tuple[int, int, int]]:
        """Returns all (example, query head, key head)."""
        batch, heads = self.q.shape[0], self.q.shape[2]
        return [(b, n, n // self.group) for b in range(batch) for n in range(heads)]

    def head_scores(self, b: int, n: int, h: int) -> _Scores:
        return _scores(self.q[b, :, n], self.k[b, :, h], self.counts[b], self.scale, self.soft_cap)


def attention_reference(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: AttnMask | ArrayLike,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Computes dense attention in fp64 on the host, for tests.

    Args:
        query: [T, N, D] or [B, T, N, D].
        key: [S, K, D] or [B, S, K, D]; N is a multiple of K.
        value: [S, K, Dv] or [B, S, K, Dv].
        mask: the mask, or its bands [C, 6] or [B, C, 6]. A cell covered by c bands has weight c.
        scale: factor of the logits, D**-0.5 by default.
        logits_soft_cap: c of c · tanh(logits / c); None for none.
        sinks: [N], logits that take part in the softmax and have no value; None for none.

    Returns:
        The output [..., T, N, Dv] and the log-sum-exp of the logits [..., T, N], natural log. A row that
        sees nothing has output 0 and log-sum-exp -inf.
    """
    problem = _Problem(query, key, value, mask, scale, logits_soft_cap, sinks)
    batch, q_len, heads, _ = problem.q.shape
    out = np.zeros((batch, q_len, heads, problem.v.shape[-1]))
    lse = np.zeros((batch, q_len, heads))
    for b, n, h in problem.heads():
        scores = problem.head_scores(b, n, h)
        lse[b, :, n] = _log_sum_exp(scores, problem.sinks[n])
        out[b, :, n] = _probabilities(scores, lse[b, :, n]) @ problem.v[b, :, h]
    return problem.drop_batch(out), problem.drop_batch(lse)


class ReferenceGradients(NamedTuple):
    """Gradients of the operands of `attention_reference`, in their shapes."""

    query: NDArray[np.float64]
    key: NDArray[np.float64]
    value: NDArray[np.float64]
    sinks: NDArray[np.float64]


def attention_reference_vjp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: AttnMask | ArrayLike,
    dout: ArrayLike,
    dlse: ArrayLike | None = None,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
) -> ReferenceGradients:
    """Computes the gradients of `attention_reference` for cotangents of its output and its log-sum-exp.

    Args:
        query: as in `attention_reference`.
        key: as in `attention_reference`.
        value: as in `attention_reference`.
        mask: as in `attention_reference`.
        dout: cotangent of the output [..., T, N, Dv].
        dlse: cotangent of the log-sum-exp [..., T, N]; None for zero.
        scale: as in `attention_reference`.
        logits_soft_cap: as in `attention_reference`.
        sinks: as in `attention_reference`.

    Returns:
        The gradients; that of the sinks is zero where there are none. Rows that see nothing and keys that
        nothing sees have gradient exactly 0.
    """
    problem = _Problem(query, key, value, mask, scale, logits_soft_cap, sinks)
    dout = problem.add_batch(dout)
    dlse = np.zeros(problem.q.shape[:3]) if dlse is None else problem.add_batch(dlse)
    dq, dk, dv = (np.zeros_like(x) for x in (problem.q, problem.k, problem.v))
    dsinks = np.zeros(problem.q.shape[2])
    for b, n, h in problem.heads():
        q, k, v = problem.q[b, :, n], problem.k[b, :, h], problem.v[b, :, h]
        scores = problem.head_scores(b, n, h)
        lse = _log_sum_exp(scores, problem.sinks[n])
        rows = ~np.isneginf(lse)
        grad, p = dout[b, rows, n], _probabilities(scores, lse)[rows]
        delta = (grad * (p @ v)).sum(axis=1) - dlse[b, rows, n]
        ds = problem.scale * p * scores.slope[rows] * (grad @ v.T - delta[:, None])
        dq[b, rows, n] = ds @ k
        dk[b, :, h] += ds.T @ q[rows]
        dv[b, :, h] += p.T @ grad
        dsinks[n] -= (np.exp(problem.sinks[n] - lse[rows]) * delta).sum()
    dq, dk, dv = (problem.drop_batch(x) for x in (dq, dk, dv))
    return ReferenceGradients(dq, dk, dv, dsinks)
