"""Sends rows to the ranks that need them, and back: ``group_cast`` and ``group_reduce`` over a mesh axis.

On GPUs the collectives have state in each process. Importing jaxmagi sets ``NCCL_LAUNCH_ORDER_IMPLICIT=1``
unless the variable is set: NCCL reads it when loaded, and without it two communicators, XLA's and that of the
collectives, may deadlock. `set_timeout` holds for programs lowered afterwards. Lowering a collective
tells the compiled code of this process how large JAX's memory pool is. Memory that is kept between calls is
freed by `finalize`.
"""

from ..planning import GroupCastSpec as GroupCastSpec, RelayedSpec as RelayedSpec
from ._api import group_cast as group_cast, group_reduce as group_reduce
from ._arguments import (
    axis_size as axis_size,
    make_transfer as make_transfer,
    on_this_rank as on_this_rank,
)
from ._options import (
    CollectiveOptions as CollectiveOptions,
    check_options as check_options,
    check_wire_dtype as check_wire_dtype,
)
from ._portable import last_at_most as last_at_most
from ._primitives import group_cast_p as group_cast_p, group_reduce_p as group_reduce_p
from ._process import finalize as finalize, set_timeout as set_timeout
from ._route import Route as Route
from ._statistics import Statistics as Statistics, statistics as statistics
from ._transfer import OneStep as OneStep
