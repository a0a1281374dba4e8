"""The transfers of keys and values that are measured, as specs of group casts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmagi import GroupCastSpec, masks, plan_context
from tests.cases import document_lengths

KV_HEADS, DIM = 8, 128
LATENCY_TOKENS = 16  # 64 KB of keys and values in bfloat16


@dataclass(frozen=True)
class Transfer:
    """A group cast of rows of keys and values, or a group reduce of their gradients, with a name."""

    name: str
    spec: GroupCastSpec

    @property
    def received_rows(self) -> np.ndarray:
        """Rows that arrive at each rank from others: int64 [cp]."""
        return np.asarray(self.spec.receives)[..., 3].sum(axis=1, dtype=np.int64)

    @property
    def returned_rows(self) -> np.ndarray:
        """Rows that come back to each rank in a reduction: int64 [cp]."""
        return np.asarray(self.spec.sends)[..., 3].sum(axis=1, dtype=np.int64)


ALL_TO_ALL, ALL_GATHER, DOCUMENTS, LATENCY = "all-to-all", "all-gather", "documents causal", "64 KB"


def _others(cp_size: int) -> list[list[int]]:
    return [[peer for peer in range(cp_size) if peer != rank] for rank in range(cp_size)]


def all_to_all(cp_size: int, tokens: int) -> GroupCastSpec:
    """Returns an all-to-all: each rank keeps the part of its rows with its own number, and sends the others.

    Raises:
        ValueError: ranks do not divide the tokens.
    """
    part, rest = divmod(tokens, cp_size)
    if rest:
        raise ValueError(f"{cp_size} ranks do not divide {tokens} tokens.")
    others = _others(cp_size)
    return GroupCastSpec.from_splits(
        input_split_sizes=[[part] * cp_size] * cp_size,
        dst_ranks=[[[peer] * (peer != rank) for peer in range(cp_size)] for rank in range(cp_size)],
        output_split_sizes=[[part] * (cp_size - 1)] * cp_size,
        src_ranks=others,
    )


def all_gather(cp_size: int, tokens: int) -> GroupCastSpec:
    """Returns an all-gather: each rank sends all of its rows to all others."""
    others = _others(cp_size)
    return GroupCastSpec.from_splits(
        input_split_sizes=[[tokens]] * cp_size,
        dst_ranks=[[ranks] for ranks in others],
        output_split_sizes=[[tokens] * (cp_size - 1)] * cp_size,
        src_ranks=others,
    )


def documents(cp_size: int, tokens: int) -> GroupCastSpec:
    """Returns what a plan of packed causal documents sends."""
    mask = masks.documents(document_lengths(cp_size * tokens), "causal")
    spec = plan_context(mask, cp_size, two_levels=False).transfer
    assert isinstance(spec, GroupCastSpec)
    return spec


_SPECS: dict[str, Callable[[int, int], GroupCastSpec]] = {
    ALL_TO_ALL: all_to_all,
    ALL_GATHER: all_gather,
    DOCUMENTS: documents,
    LATENCY: lambda cp_size, _: all_gather(cp_size, LATENCY_TOKENS),
}


def transfers(cp_size: int, tokens: int) -> list[Transfer]:
    """Returns all transfers between ``cp_size`` ranks with ``tokens`` tokens each."""
    return [Transfer(name, make(cp_size, tokens)) for name, make in _SPECS.items()]
