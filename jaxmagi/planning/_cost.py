"""A model of the machine, to compare plans with."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from .._checks import is_number

_MAY_BE_ZERO = ("latency_us", "network_latency_us")
_MOST_PACKED_HEADS = 16

MOST_PARTS = 8
# A rank receives so many bytes at least for a part of the heads. Within a host 16 MiB take some 50 us:
# smaller parts cost more in kernels and barriers than they hide (docs/log/context.md).
LEAST_PART_BYTES, LEAST_PART_BYTES_WITHIN_HOST = 2**22, 2**24


class Tile(NamedTuple):
    """Queries and keys of a tile of a kernel, for one head."""

    rows: int
    keys: int


class Pass(NamedTuple):
    """One direction of attention, forward or backward.

    Attributes:
        tile: what the kernel computes at a time.
        by_keys: whether its tiles own keys and visit blocks of queries, instead of the other way round.
        scheduled: queries (by keys: keys) of a tile of its schedule, which holds several tiles where heads
            are packed.
        cell_seconds: time of a cell of a tile, of all heads.
        returns_gradients: whether received keys send gradients back.
    """

    tile: Tile
    by_keys: bool
    scheduled: int
    cell_seconds: float
    returns_gradients: bool


# Tiles of the kernels in csrc/attention/sm90, by the largest head dimension that they are for.
_FORWARD_TILES = {64: (192, 128), 96: (192, 112), 128: (192, 80), 192: (128, 112), 256: (128, 80)}
_BACKWARD_TILES = {64: (128, 128), 96: (64, 128), 128: (80, 128), 192: (64, 96), 256: (64, 64)}


def num_parts(num_kv_heads: int, received_bytes: float, *, within_host: bool = False) -> int:
    """Returns into how many parts the heads are cut, of which one computes while rows of others travel.

    The more there are, the sooner attention to received keys begins, and the less is left to return behind
    the last of it. They divide the key heads, are at most 8, and a rank receives 4 MiB at least for each, of
    all examples, and 16 MiB within a host: each costs some tenths of a millisecond between hosts, where the
    host waits for its transfer, and some hundredths within one. There the backward pass has one.
    """
    least = LEAST_PART_BYTES_WITHIN_HOST if within_host else LEAST_PART_BYTES
    most = max(1, min(MOST_PARTS, received_bytes // least))
    return max(parts for parts in range(1, MOST_PARTS + 1) if num_kv_heads % parts == 0 and parts <= most)


@dataclass(frozen=True)
class CostModel:
    """Speeds of a machine and shapes of the attention, to predict the time of a plan.

    The defaults are those of hosts with eight H100 or H200, NVLink and a 400 Gb/s network card for each GPU,
    and of a layer with 64 query heads, 8 key heads and head dimension 128 in bfloat16. The speeds of
    attention, the cost of partial tiles (between those of the two passes) and the speed of NVLink fit what
    was measured on an H200 (docs/log/planner.md); that of the network was not measured. `jaxmagi.calibrate`
    measures other machines. Only ratios matter to the planner.

    A kernel works in tiles, so work is counted in whole tiles of the kernels for compute capability 9.0.
    Ranks with consecutive numbers share a host. Links within hosts and between hosts work at the same time
    for keys and values, and one after the other for their gradients.

    Attributes:
        tflops: forward speed of one rank at tiles without invisible cells, in 1e12 FLOP/s.
        backward_tflops: backward speed at such tiles.
        partial_tile_cost: time of a tile with invisible cells, in times of one without.
        link_gb_per_second: what a rank can receive (and at the same time send) within its host, in
            1e9 bytes/s.
        network_gb_per_second: what it can receive, and at the same time send, between hosts.
        ranks_per_host: ranks ``0 .. n - 1`` share the first host, and so on.
        memory_gb_per_second: what a rank can read and write in its memory, in 1e9 bytes/s.
        latency_us: fixed time of one transfer within a host, and of attention to own keys and to others, in
            microseconds.
        network_latency_us: fixed time of one transfer between hosts.
        num_heads: query heads of a rank.
        num_kv_heads: key heads of a rank.
        head_dim: dimension of a query, key and value head.
        bytes_per_element: of keys and values.
        bytes_per_gradient: of an element of gradients of keys and values on their way back, 4 in float32 and
            2 with ``CollectiveOptions(wire_dtype=jnp.bfloat16)``. They are added up in float32 in any case.

    Raises:
        ValueError: one of them is not a number from 1e-12 to 1e12 (latencies may be 0), ``ranks_per_host``, a
            number of heads, ``head_dim``, ``bytes_per_element`` or ``bytes_per_gradient`` is no integer up to
            2**30, or ``num_heads`` is no multiple of ``num_kv_heads``.
    """

    tflops: float = 740.0
    backward_tflops: float = 545.0
    partial_tile_cost: float = 2.2
    link_gb_per_second: float = 350.0
    network_gb_per_second: float = 45.0
    ranks_per_host: int = 8
    memory_gb_per_second: float = 4000.0
    latency_us: float = 15.0
    network_latency_us: float = 30.0
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    bytes_per_element: int = 2
    bytes_per_gradient: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_number(value) or not (1e-12 <= value <= 1e12 or (value == 0 and name in _MAY_BE_ZERO)):
                raise ValueError(f"CostModel.{name} must be from 1e-12 to 1e12, but it is {value!r}.")
        for name in (field.name for field in fields(self) if field.type is int):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value > 2**30:
                raise ValueError(f"CostModel.{name} must be an integer up to 2**30, but it is {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"CostModel.num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}."
            )

    @property
    def row_bytes(self) -> int:
        """A row of keys and values."""
        return self._row_size * self.bytes_per_element

    @property
    def gradient_row_bytes(self) -> int:
        """A row of gradients of keys and values, as it travels."""
        return self._row_size * self.bytes_per_gradient

    @property
    def _row_size(self) -> int:
        """The elements in a row of keys and values."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def forward(self) -> Pass:
        """The forward pass, whose tiles hold several heads of a group at fewer queries."""
        group = self.num_heads // self.num_kv_heads
        packed = min(group & -group, _MOST_PACKED_HEADS)
        dim, (rows, keys) = _kernel(_FORWARD_TILES, self.head_dim)
        seconds = 4.0 * self.num_heads * dim / (self.tflops * 1e12)
        return Pass(Tile(rows // packed, keys), False, rows, seconds, False)

    @property
    def backward(self) -> Pass:
        """The backward pass, with 2.5 times the operations of the forward pass."""
        dim, (rows, keys) = _kernel(_BACKWARD_TILES, self.head_dim)
        seconds = 10.0 * self.num_heads * dim / (self.backward_tflops * 1e12)
        return Pass(Tile(rows, keys), True, keys, seconds, True)

    def cells_per_row(self, cp_size: int) -> int:
        """Returns how many forward cells take as long as a row over the slowest link of ``cp_size`` ranks."""
        far = cp_size > self.ranks_per_host
        speed = self.network_gb_per_second if far else self.link_gb_per_second
        return max(1, round(min(self.row_bytes / (speed * 1e9) / self.forward.cell_seconds, 2.0**30)))

    def compute_seconds(self, tiles: np.ndarray, direction: Pass) -> np.ndarray:
        """Returns the times ``[...]`` of attention calls over full and partial tiles ``[..., 2]``."""
        full, partial = tiles[..., 0], tiles[..., 1]
        cells = (full + self.partial_tile_cost * partial) * (direction.tile.rows * direction.tile.keys)
        return cells * direction.cell_seconds + (full + partial > 0) * self.latency_us * 1e-6

    def transfer_seconds(self, rows: np.ndarray, row_bytes: float) -> np.ndarray:
        """Returns the times ``[...]`` of transfers with rows ``[..., 2]`` within a host and between hosts.

        The rows are those on the busiest links. Links of both kinds work at the same time.
        """
        return self._link_seconds(rows, row_bytes).max(axis=-1)

    def reduction_seconds(self, rows: np.ndarray, row_bytes: float) -> np.ndarray:
        """Returns the times ``[...]`` of transfers back along the same links, whose rows are added up.

        A rank reads what peers of its host have after the network has brought what others have.
        """
        return self._link_seconds(rows, row_bytes).sum(axis=-1)

    def _link_seconds(self, rows: np.ndarray, row_bytes: float) -> np.ndarray:
        """Returns the times of both kinds of links ``[..., 2]``."""
        speeds = np.array([self.link_gb_per_second, self.network_gb_per_second]) * 1e9
        latencies = np.array([self.latency_us, self.network_latency_us]) * 1e-6
        return rows * (row_bytes / speeds) + (rows > 0) * latencies

    def memory_seconds[Bytes: (float, np.ndarray)](self, count: Bytes) -> Bytes:
        """Returns the time to read or write so many bytes in a rank's memory."""
        return count / (self.memory_gb_per_second * 1e9)


def _kernel(tiles: dict[int, tuple[int, int]], head_dim: int) -> tuple[int, tuple[int, int]]:
    """Returns the dimension that a kernel computes with, and its tile; the largest tile serves all above."""
    dim = next((dim for dim in tiles if dim >= head_dim), max(tiles))
    return max(dim, head_dim), tiles[dim]
