"""Defines `CollectiveOptions`, by which users choose how rows travel between ranks."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._checks import check_one_of, integer
from .._dtypes import DTYPES
from .._hopper import MAX_SMS
from ._process import check_seconds

type Implementation = Literal["native", "nccl", "xla"] | None

IMPLEMENTATIONS = ("native", "nccl", "xla", None)

NUM_SMS = 16
"""The default number of multiprocessors of the native kernels."""


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """How rows travel between ranks. It is static: hashable, and part of the compiled program.

    It is the ``options`` of `group_cast` and `group_reduce`, and the ``collectives`` of `context_attention`
    and `nn.attention_fn`, where it holds for all transfers of both passes. Products with a collective
    (`all_gather_matmul`) take it too: None is what was measured to be faster there, ``wire_dtype`` may be as
    wide as accumulators, and their kernels, "native", take all multiprocessors of ranks on one host:
    ``num_sms`` and ``ranks_per_host`` do not count.

    "native" and "nccl" are custom calls for GPUs: over NVLink straight into the memory of peers on the same
    host, at most 64 of them, and by NCCL to any peer. Over NCCL exactly the rows that each pair of ranks
    exchanges travel, and pairs without rows exchange nothing; for this a call waits until the GPU has come
    to it, and reads the spec on the host.

    Attributes:
        implementation: "native", "nccl" or "xla" (plain JAX, on any platform). None: on GPUs, for every two
            ranks, "native" within a host and "nccl" between hosts; "xla" where that does not fit.
        num_sms: "native" takes at most this many multiprocessors of a GPU, from 1 to 132. In
            `context_attention` at most 32, and attention leaves as many free while rows travel, but at most
            4 where NCCL moves all of them.
        ranks_per_host: ranks of the axis with the same ``rank // ranks_per_host`` are taken to share a host.
            None: what the hardware says, or that of a spec by `GroupCastSpec.by_host`.
        wire_dtype: dtype that gradients and the rows of `group_reduce` are rounded to before they travel:
            float64, float32, bfloat16 or float16, and no wider than these rows. Owners add up in float32
            (float64 for float64 on the wire), and the dtypes of results stay. With a spec by
            `GroupCastSpec.by_host` rows for other hosts are rounded twice: each before it travels inside its
            host, and the sum of a host before it crosses to another one. None: rows travel in their own
            dtype, but with such a spec those sums, and rows for ranks of the own host, travel in float32
            (float64 for float64) by `group_reduce`; where `group_cast` is transposed, in the dtype of the
            gradient. In `context_attention` the rows are gradients of keys and values in float32 (float64
            for float64); `CostModel.bytes_per_gradient` tells the planner how wide they travel.
        timeout: seconds that a custom call waits for its peers before it reports an error, from 0.001 to
            1,000,000 and the same on all ranks. None: that of `jaxmagi.collectives.set_timeout`. Plain JAX
            has no limit of its own.

    Raises:
        ValueError: an attribute is none of the above, or "xla" is given a timeout.
    """

    implementation: Implementation = None
    num_sms: int = NUM_SMS
    ranks_per_host: int | None = None
    wire_dtype: jax.typing.DTypeLike | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_one_of("implementation", self.implementation, IMPLEMENTATIONS)
        self._set("num_sms", integer(self.num_sms, "num_sms", minimum=1, maximum=MAX_SMS))
        if self.ranks_per_host is not None:
            self._set("ranks_per_host", integer(self.ranks_per_host, "ranks_per_host", minimum=1))
        if self.wire_dtype is not None:
            self._set("wire_dtype", _wire_dtype(self.wire_dtype))
        if self.timeout is not None:
            self._set("timeout", check_seconds(self.timeout, "timeout"))
            if self.implementation == "xla":
                raise ValueError(f'timeout={self.timeout}, but implementation="xla" has no time limit.')

    def _set(self, name: str, value: Any) -> None:
        """Sets an attribute to the one form that equal options have, so that programs are compiled once."""
        object.__setattr__(self, name, value)


def _wire_dtype(given: Any) -> jnp.dtype:
    try:
        dtype = jnp.dtype(given)
    except TypeError as error:
        raise ValueError(f"wire_dtype must be a dtype, but it is {given!r}.") from error
    check_one_of("wire_dtype", dtype.name, DTYPES)
    return dtype


def check_options(name: str, options: Any) -> None:
    """Raises ValueError unless ``options`` is a `CollectiveOptions`."""
    if not isinstance(options, CollectiveOptions):
        raise ValueError(f"{name} must be a jaxmagi.CollectiveOptions, but it is {type(options).__name__}.")


def check_wire_dtype(options: CollectiveOptions, what: str, dtype: jnp.dtype) -> None:
    """Raises ValueError unless ``wire_dtype`` is None, ``dtype``, or narrower than this floating dtype."""
    if options.wire_dtype is None:
        return
    wire = jnp.dtype(options.wire_dtype)
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and wire.itemsize < dtype.itemsize
    if wire != dtype and not is_narrower:
        raise ValueError(
            f"wire_dtype={wire.name}, but {what} {dtype.name}: floating-point rows travel in their own dtype "
            "(wire_dtype=None), or rounded to a narrower one."
        )
