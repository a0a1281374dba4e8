"""Tells what the collectives of this process have moved."""

from dataclasses import dataclass

from .. import _native


@dataclass(frozen=True)
class Statistics:
    """Sums over the transfers of this process's GPUs since it began; differences tell of single ones.

    Rows that a rank keeps for itself do not count, nor do transfers in plain JAX.

    Attributes:
        transfers: calls of `group_cast` and `group_reduce`, counted on each rank, derivatives included, and
            each part and step of the transfers of `context_attention`.
        native_bytes: of rows that kernels have stored to native peers, or loaded from them.
        nccl_bytes: of rows that this process has sent over NCCL.
        nccl_messages: messages that these rows went by.
        control_bytes: sent over NCCL beside the rows: 40 for each pair of ranks that exchange rows in a call.
    """

    transfers: int = 0
    native_bytes: int = 0
    nccl_bytes: int = 0
    nccl_messages: int = 0
    control_bytes: int = 0


def statistics() -> Statistics:
    """Returns what the collectives of this process have moved so far.

    It waits until its GPUs have nothing left to do. Call it between programs, not while one is running.
    Without CUDA all numbers are 0.
    """
    compiled = _native.extension("cuda")
    return Statistics() if compiled is None else Statistics(**compiled.collective_statistics())
