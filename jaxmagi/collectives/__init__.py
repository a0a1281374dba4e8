"""Rows to the ranks that need them, and back: ``group_cast`` and ``group_reduce`` over a mesh axis."""

from ..planning import GroupCastSpec as GroupCastSpec, RelayedSpec as RelayedSpec
from ._api import group_cast as group_cast, group_reduce as group_reduce
from ._arguments import (
    axis_size as axis_size,
    make_transfer as make_transfer,
    on_this_rank as on_this_rank,
)
from ._in_flight import Flight as Flight, in_order as in_order
from ._primitives import group_cast_p as group_cast_p, group_reduce_p as group_reduce_p
from ._process import finalize as finalize, set_timeout as set_timeout
